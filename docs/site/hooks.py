"""What `mkdocs build` does beyond its configuration.

Pages link to files outside of `docs/`: examples, records, the changelog. On GitHub such links work as they are. In the
site every linked file becomes a page or a download. The notebook becomes a page with its saved outputs. The reference
of the command is written from its own help.
"""

from __future__ import annotations

import html
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "README.md": "index.md"}
NOTEBOOKS = {"examples/digits.ipynb": "notebook.md"}
LINK = re.compile(r"\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")


def site_path(path: str) -> str | None:
    """Where the site has a file of the repository. None if it is in `docs/`, and so at its own place."""
    if path in PAGES | NOTEBOOKS:
        return (PAGES | NOTEBOOKS)[path]
    if path.startswith("docs/"):
        return None
    return f"files/{path}.md" if path.endswith(".py") else f"files/{path}"


def linked(text: str, folder: str) -> dict[str, str]:
    """The files of the repository that a page in this folder links to, by the link."""
    found = {match[1]: posixpath.normpath(posixpath.join(folder, match[1])) for match in LINK.finditer(text)}
    return {link: path for link, path in found.items() if (ROOT / path).is_file()}


def rewritten(text: str, folder: str, page: str) -> str:
    """The text of a page of the site, with links to places of the site."""
    here, targets = posixpath.dirname(page), linked(text, folder)

    def replace(match: re.Match[str]) -> str:
        path = targets.get(match[1])
        target = path and (site_path(path) or path.removeprefix("docs/"))
        return f"]({posixpath.relpath(target, here or '.')}{match[2] or ''})" if target else match[0]

    return LINK.sub(replace, text)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, target in PAGES.items():
        if target != "index.md":
            text = rewritten((ROOT / source).read_text(encoding="utf-8"), ".", target)
            files.append(File.generated(config, target, content=text))
    files.append(File.generated(config, "cli.md", content=command_reference()))
    for source, target in NOTEBOOKS.items():
        files.append(File.generated(config, target, content=notebook_page(source, target)))
    sources = {page.abs_src_path: "docs" for page in files.documentation_pages() if page.abs_src_path}
    sources |= {str(ROOT / source): "." for source in PAGES}
    wanted = {
        path for page, folder in sources.items() for path in linked(Path(page).read_text("utf-8"), folder).values()
    }
    for path in sorted(wanted):
        target = site_path(path)
        if target is None or target in (PAGES | NOTEBOOKS).values():
            continue
        if path.endswith(".py"):
            code = (ROOT / path).read_text(encoding="utf-8")
            page = f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n```python\n{code}```\n"
            files.append(File.generated(config, target, content=page))
        else:
            files.append(File.generated(config, target, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return markdown if page.file.generated_by else rewritten(markdown, "docs", page.file.src_uri)


def notebook_page(source: str, target: str) -> str:
    """A notebook as Markdown: its texts, its code, and the outputs that are saved in it."""
    parts = []
    for cell in json.loads((ROOT / source).read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(rewritten(text, posixpath.dirname(source), target))
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", [])})
            if "image/png" in data:
                parts.append(
                    f'<img alt="output of the cell above" src="data:image/png;base64,{data["image/png"].strip()}">'
                )
            else:
                parts.append(f'<pre class="output">{html.escape("".join(data["text/plain"]).rstrip())}</pre>')
    return "\n\n".join(parts) + "\n"


def command_reference() -> str:
    """A page with the help of every command, as typer prints it."""
    import typer
    from typer.main import get_command

    from kalmannorm_command.app import app

    def described(command: Any, name: str) -> list[str]:
        context = typer.Context(command, info_name=name)
        lines = [f"## {name}", "", (command.help or "").split("\f")[0].strip(), ""]
        rows = [p.get_help_record(context) for p in command.params if not getattr(p, "hidden", False)]
        shown = [(a.replace("|", "\\|"), b.replace("|", "\\|").replace("\n", " ")) for a, b in filter(None, rows)]
        if shown:
            lines += ["| option | what it does |", "| --- | --- |", *(f"| `{a}` | {b} |" for a, b in shown), ""]
        for child, inner in getattr(command, "commands", {}).items():
            if not inner.hidden:
                lines += described(inner, f"{name} {child}")
        return lines

    head = ["# The command", "", "This page is written from the help of the command: `kalmannorm COMMAND --help`.", ""]
    return "\n".join(head + described(get_command(app), "kalmannorm"))
