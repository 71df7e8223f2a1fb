"""Where things live, from the environment (`FLEDGE_HOME`, `FLEDGE_MLFLOW_TRACKING_URI`, ...).

Algorithm defaults are in `drafter/config.py`, a run's own values in `prefect.yaml` or the run form.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit, urlunsplit

from pydantic import AliasChoices, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from drafter.errors import FledgeError


class Places(BaseSettings):
    """Directories, addresses and names of one installation. Read anew by each flow run."""

    model_config = SettingsConfigDict(
        env_prefix="FLEDGE_", frozen=True, extra="ignore", env_ignore_empty=True, validate_by_name=True
    )

    home: Path = Field(default=Path(".fledge"), description="Directory of everything that runs write.")
    mlflow_tracking_uri: SecretStr | None = Field(
        default=None,
        description="MLflow server or store; may carry credentials, so it is never shown. None: SQLite in home.",
    )
    mlflow_experiment: str = Field(default="fledge", description="MLflow experiment of the runs.")
    model_name: str = Field(
        default="fledge-drafter",
        pattern=r"^[^/:]+$",
        description="Registered model in MLflow. One name serves one target.",
    )
    vllm_python: Path = Field(
        default=Path(".venv-vllm/bin/python"), description="Python of the environment that holds vLLM."
    )
    python: Path = Field(
        default=Path(sys.executable), description="Python that runs `python -m drafter VERB`."
    )
    pages_url: str | None = Field(
        default=None,
        description="Address under which a web server shows home, for links that open in a browser.",
    )
    mlflow_ui_url: str | None = Field(
        default=None, description="Address of MLflow's pages, where the tracking URI is none itself."
    )
    bucket: str = Field(
        default="fledge",
        pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$",
        description="S3 bucket of drafters on their way to an endpoint, and of what endpoints capture.",
    )
    execution_role_arn: str | None = Field(
        default=None,
        pattern=r"^arn:aws[a-z-]*:iam::\d{12}:role/.+$",
        description="IAM role that SageMaker takes on to read the bucket; a deployment needs it.",
    )
    region: str = Field(
        default="us-east-1",
        validation_alias=AliasChoices("AWS_REGION", "AWS_DEFAULT_REGION", "FLEDGE_REGION"),
        description="AWS region of endpoints, bucket and alarms. AWS_REGION and AWS_DEFAULT_REGION win.",
    )
    approvers: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Who may approve a drafter, separated by commas. Empty: nobody.",
    )
    cloud: Literal["auto", "local", "aws"] = Field(
        default="auto",
        description="`local`: SageMaker, S3 and CloudWatch of fledge up; `aws`: AWS; `auto`: local while "
        "fledge up runs on this home, else AWS.",
    )

    def __init__(self, **values: Any) -> None:
        """From the environment, and what is given by name.

        Raises:
            FledgeError: a variable holds what its field does not take.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _explain(error) from None

    @field_validator("approvers", mode="before")
    @classmethod
    def _split_at_commas(cls, given: object) -> object:
        if isinstance(given, str):
            return tuple(name.strip() for name in given.split(",") if name.strip())
        return given

    @property
    def tracking_uri(self) -> str:
        """What MLflow is given. May hold a password: for MLflow only, never for a log."""
        if self.mlflow_tracking_uri is not None:
            return self.mlflow_tracking_uri.get_secret_value()
        return f"sqlite:///{self.home.resolve() / 'mlflow.db'}"

    @property
    def shown_tracking_uri(self) -> str:
        """The tracking URI without user name and password."""
        return without_credentials(self.tracking_uri)

    @property
    def artifact_location(self) -> str | None:
        """Where MLflow keeps artifacts; None leaves it to the server."""
        if self.tracking_uri.startswith("sqlite:"):
            return (self.home.resolve() / "mlflow-artifacts").as_uri()
        return None

    @property
    def stages(self) -> Path:
        """Directory of finished and unfinished stages, each named by its digest."""
        return self.home / "stages"

    @property
    def runs(self) -> Path:
        """Directory of one record per flow run."""
        return self.home / "runs"

    @property
    def services_file(self) -> Path:
        """What `fledge up` wrote down of itself, for verbs in other terminals."""
        return self.home / "services.json"

    def link(self, path: Path) -> str:
        """Address of a file of a run: below `pages_url` where a server shows home, else a file URI."""
        path, home = path.resolve(), self.home.resolve()
        if self.pages_url and path.is_relative_to(home):
            return f"{self.pages_url.rstrip('/')}/{path.relative_to(home).as_posix()}"
        return path.as_uri()

    def version_link(self, version: str) -> str | None:
        """MLflow's page of a registered version; None when no MLflow server is known."""
        pages = self.mlflow_ui_url or self.shown_tracking_uri
        if not pages.startswith(("http://", "https://")):
            return None
        return f"{without_credentials(pages).rstrip('/')}/#/models/{self.model_name}/versions/{version}"


def _explain(error: ValidationError) -> FledgeError:
    """The first mistake by the name of its variable. The value is not shown where it may be a secret."""
    problem = error.errors(include_url=False)[0]
    name = str(problem["loc"][0]) if problem["loc"] else ""
    field = Places.model_fields.get(name)
    secret = field is not None and "Secret" in str(field.annotation)
    variable = name if name.startswith("AWS_") else f"FLEDGE_{name.upper()}"
    return FledgeError(
        variable if secret else f"{variable} is {problem['input']!r}",
        problem["msg"],
        f"set it to: {field.description}" if field is not None else "correct the variable, or unset it",
    )


def without_credentials(uri: str) -> str:
    """`https://user:secret@host/x` as `https://host/x`; other URIs unchanged."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
