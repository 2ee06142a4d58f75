"""Check a built site: every link leads to a file and an anchor, and nothing is loaded from elsewhere.

python docsite/check.py DIRECTORY
"""

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}


class _Page(HTMLParser):
    """The anchors of a page, its links, and what a browser loads for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        for name in ("id", "name"):
            if value := given.get(name):
                self.anchors.add(value)
        for name in ("href", "src"):
            if value := given.get(name):
                self.links.append(value)
                if (tag, name) in _LOADED and given.get("rel") != "canonical":
                    self.loaded.append(value)


def faults(site: Path) -> Iterator[str]:
    """One line for each link that leads nowhere, and for each file that is loaded from elsewhere."""
    pages = {path: _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        for url in page.loaded:
            if urlsplit(url).netloc:
                yield f"{path.relative_to(site)}: loads {url}"
        if path.name == "404.html":
            continue  # its links begin at the root of whatever serves it
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                yield f"{path.relative_to(site)}: {link}: there is no such file"
            elif parts.fragment and target.suffix == ".html":
                anchors = pages[site / target.relative_to(site.resolve())].anchors
                if unquote(parts.fragment) not in anchors:
                    yield f"{path.relative_to(site)}: {link}: there is no such anchor"


def main() -> None:
    """Exit status 1 if anything is wrong."""
    site = Path(sys.argv[1])
    found = list(faults(site))
    print("\n".join(found) or f"{site}: {len(list(site.rglob('*.html')))} pages, every link leads somewhere")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
