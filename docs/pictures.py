"""Draw the README's pictures from real runs on this machine's CPU (make pictures). Needs Chromium."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
SETTINGS = (
    "amp=off,bf16 pt-compile=false,true bsz=8 seq-len=256 n-steps=40 warmup-steps=5 device=cpu"
)


def run(*argv: str) -> None:
    """Run one of our scripts."""
    subprocess.run([sys.executable, *argv], cwd=ROOT, check=True)


def draw(page: Path, name: str, width: int, height: int, more: str = "", link: str = "") -> None:
    """Render a page to docs/images/NAME, with more of Chromium's flags and a link's end."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        raise SystemExit("docs/pictures.py: needs chromium or google-chrome on the PATH")
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-background-networking --hide-scrollbars"
    )
    size, target = f"--window-size={width},{height}", f"--screenshot={IMAGES / name}"
    words = [chromium, *flags.split(), *more.split(), size, target, page.as_uri() + link]
    subprocess.run(words, check=True)


def main() -> None:
    """A sweep as a report."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        runs = str(top / "sweep")
        sweep = ["sweep.py", "--models", "configs/llama-tiny.json", "--repeats", "5"]
        run(*sweep, "--output-dir", runs, "--set", *SETTINGS.split())
        run("compare.py", f"{runs}/runs", "--output-dir", folder)
        draw(top / "report.html", "report.png", 1500, 612)


if __name__ == "__main__":
    main()
