"""Screenshots of the built site in headless Chromium: python docsite/shots.py SITE DIRECTORY"""

import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PAGES = {
    "quickstart": "quickstart.html",
    "guide": "guides/migrate-from-lmcache.html",
    "reference": "reference/metrics.html",
}
SIZE = "1280,900"


class Quiet(SimpleHTTPRequestHandler):
    """The site's files, without a line for each."""

    def log_message(self, *words: object) -> None:
        pass


def main(site: Path, directory: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("there is no Chromium here: apt-get install chromium")
    directory.mkdir(parents=True, exist_ok=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, page in PAGES.items():
            if not (site / page).is_file():
                sys.exit(f"the site has no {page}: build it first, with `make site`")
            url = f"http://127.0.0.1:{server.server_address[1]}/{page}"
            shot = directory / f"{name}.png"
            words = ["--headless=new", "--no-sandbox", "--hide-scrollbars", f"--window-size={SIZE}"]
            command = [browser, *words, "--virtual-time-budget=5000", f"--screenshot={shot}", url]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            print(f"{shot}: {url}")
        server.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
