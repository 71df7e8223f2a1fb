"""What the local SageMaker remembers: models, endpoint configs, endpoints and tags, in one SQLite file.

Every change is one transaction in a write-ahead log, so that a kill at any moment leaves the state before the
change or after it. Bodies are JSON: a model and a config are the request that made them, an endpoint is an
`EndpointRecord`.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["model", "endpoint-config", "endpoint"]

_TABLES = """
CREATE TABLE IF NOT EXISTS resources (
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    body TEXT NOT NULL,
    created_at REAL NOT NULL,
    modified_at REAL NOT NULL,
    PRIMARY KEY (kind, name)
);
CREATE TABLE IF NOT EXISTS tags (
    arn TEXT NOT NULL,
    key TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (arn, key)
);
"""


class Resource(NamedTuple):
    """One stored thing. Times are seconds since the epoch."""

    name: str
    body: dict[str, Any]
    created_at: float
    modified_at: float


class Store:
    """The SQLite file. Used from the event loop's thread only; each call takes well under a millisecond."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(path)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.executescript(_TABLES)

    def close(self) -> None:
        self._connection.close()

    def put(self, kind: Kind, name: str, body: dict[str, Any]) -> None:
        """Create or replace; the time of creation stays."""
        now = time.time()
        with self._connection:
            self._connection.execute(
                "INSERT INTO resources VALUES (?, ?, ?, ?, ?) ON CONFLICT (kind, name) "
                "DO UPDATE SET body = excluded.body, modified_at = excluded.modified_at",
                (kind, name, json.dumps(body), now, now),
            )

    def get(self, kind: Kind, name: str) -> Resource | None:
        rows = self._connection.execute(
            "SELECT name, body, created_at, modified_at FROM resources WHERE kind = ? AND name = ?",
            (kind, name),
        )
        return next((_resource(row) for row in rows), None)

    def all(self, kind: Kind) -> list[Resource]:
        rows = self._connection.execute(
            "SELECT name, body, created_at, modified_at FROM resources WHERE kind = ?", (kind,)
        )
        return [_resource(row) for row in rows]

    def delete(self, kind: Kind, name: str, arn: str) -> None:
        """Forget a resource together with its tags."""
        with self._connection:
            self._connection.execute("DELETE FROM resources WHERE kind = ? AND name = ?", (kind, name))
            self._connection.execute("DELETE FROM tags WHERE arn = ?", (arn,))

    def tags(self, arn: str) -> dict[str, str]:
        rows = self._connection.execute("SELECT key, value FROM tags WHERE arn = ? ORDER BY key", (arn,))
        return dict(rows.fetchall())

    def put_tags(self, arn: str, tags: dict[str, str]) -> None:
        with self._connection:
            self._connection.executemany(
                "INSERT OR REPLACE INTO tags VALUES (?, ?, ?)",
                [(arn, key, value) for key, value in tags.items()],
            )

    def delete_tags(self, arn: str, keys: Iterable[str]) -> None:
        with self._connection:
            self._connection.executemany(
                "DELETE FROM tags WHERE arn = ? AND key = ?", [(arn, key) for key in keys]
            )


def _resource(row: tuple[str, str, float, float]) -> Resource:
    name, body, created_at, modified_at = row
    return Resource(name, json.loads(body), created_at, modified_at)
