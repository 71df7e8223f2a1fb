"""Write docs/modules.md: every module with the first line of its docstring.

python scripts/list_modules.py            writes the page
python scripts/list_modules.py --print    shows it
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "modules.md"
FOLDERS = {
    "flows": "What happens, in order: prose over tasks. The `fledge` command is here too.",
    "tasks": "Thin adapters, one outside system a file. No torch.",
    "drafter": "The science: runs from a shell, without any service.",
    "containers/vllm/fledge_vllm": "Our package inside the vLLM environment.",
    "containers/local": "SageMaker of this machine.",
    "containers/train": "The training image.",
    "containers/serve": "The serving image.",
    "benchmarks": "The comparisons of README and docs, one command each.",
    "examples": "`make demo`.",
}
HEAD = """\
# Every module

Written by `python scripts/list_modules.py` from the modules' own first lines; a test keeps it current. What the parts are and why they are cut that way is in [architecture.md](architecture.md), what to edit to change what in [CONTRIBUTING.md](../CONTRIBUTING.md).
"""


def main() -> None:
    page = modules_page()
    if "--print" in sys.argv:
        sys.stdout.write(page)
    else:
        PAGE.write_text(page, encoding="utf-8")


def modules_page() -> str:
    """The page as the sources say now."""
    return HEAD + "".join(_section(folder, text) for folder, text in FOLDERS.items())


def modules_of(folder: str) -> list[Path]:
    """The modules of a folder, without packages' own files."""
    return sorted(path for path in (ROOT / folder).glob("*.py") if path.name != "__init__.py")


def first_line(module: Path) -> str:
    """First line of a module's docstring."""
    text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8")))
    assert text, f"{module} has no docstring"
    return text.splitlines()[0].replace("|", r"\|")


def _section(folder: str, text: str) -> str:
    modules = modules_of(folder)
    if not modules:
        return ""
    rows = "".join(f"| `{module.name}` | {first_line(module)} |\n" for module in modules)
    return f"\n## {folder}/\n\n{text}\n\n| module | what it is |\n|---|---|\n{rows}"


if __name__ == "__main__":
    main()
