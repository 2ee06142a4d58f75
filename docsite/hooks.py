"""Hooks of mkdocs: links of pages that lead out of docs/ lead to copies on the site."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages of the repository's root, and their names on the site."""

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages of the root, and every file outside docs/ that a page links to."""
    for name, made in PAGES.items():
        if (ROOT / name).is_file():
            files.append(File.generated(config, made, content=(ROOT / name).read_text()))
    linked = {path for file in files if file.is_documentation_page() for path in _outside(file)}
    for path in sorted(linked):
        files.append(File.generated(config, f"repository/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_more: Any) -> str:
    """The page with its links as they are on the site."""

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        path = _in_repository(page.file.src_uri, target)
        if path is None:
            return found[0]
        made = _on_site(path)
        if made is None:
            return text
        here = posixpath.dirname(page.file.src_uri)
        return f"[{text}]({posixpath.relpath(made, here or '.')}{anchor})"

    return _LINK.sub(link, markdown)


def _outside(file: File) -> set[str]:
    """Files of the repository that a page links to and that are no pages of the site."""
    targets = (_in_repository(file.src_uri, found[2]) for found in _LINK.finditer(file.content_string))
    paths = {path for path in targets if path is not None and (_on_site(path) or "").startswith("repository/")}
    return paths


def _in_repository(page: str, target: str) -> str | None:
    """The path in the repository that a link leads to; None for another address."""
    if "://" in target or target.startswith(("mailto:", "/")):
        return None
    roots = {made: name for name, made in PAGES.items()}
    start = "" if page in roots else posixpath.join("docs", posixpath.dirname(page))
    return posixpath.normpath(posixpath.join(start, target))


def _on_site(path: str) -> str | None:
    """Where something of the repository is on the site; None for directories, which are not there."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/") and (ROOT / path).is_file():
        return path.removeprefix("docs/")
    return f"repository/{path}" if (ROOT / path).is_file() else None
