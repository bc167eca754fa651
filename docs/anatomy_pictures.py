"""`python -m docs.anatomy_pictures` draws the pictures of docs/anatomy.md.

It needs a browser (`make browser`) and Pillow. Times and fonts differ between machines, so no test
compares the pictures.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

from tests.check.anatomy.test_page import BROWSERS

DOCS = Path(__file__).parent
EXAMPLES = DOCS.parent / "examples/user_trainers"
SIZE = (1200, 3000)  # pixels; what is empty below the page is cut off
MARGIN, COLOURS = 16, 128
TRAIN = re.compile(r'^```python title="train.py"\n(.*?)^```$', re.DOTALL | re.MULTILINE)


def scripts() -> dict[str, tuple[str, str]]:
    """Return by picture the name and the text of its script."""
    tutorial = TRAIN.search((DOCS / "tutorial.md").read_text("utf-8"))
    assert tutorial is not None
    sharded = (EXAMPLES / "fsdp.py").read_text("utf-8")
    return {"anatomy-ddp": ("train.py", tutorial[1]), "anatomy-fsdp": ("fsdp.py", sharded)}


def draw(picture: Path, script: str, text: str) -> None:
    """Write the picture of the page of `script` on two ranks."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / script).write_text(text, encoding="utf-8")
        launcher = ("torchrun", "--standalone", "--nproc_per_node=2", script)
        command = (sys.executable, "-m", "entrenar_py.check.cli", "anatomy", "--html", "step.html")
        subprocess.run([*command, "--", *launcher], cwd=folder, check=True)
        browser = next(filter(None, map(shutil.which, BROWSERS)))
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
        size = f"--window-size={SIZE[0]},{SIZE[1]}"
        shot = folder / "step.png"
        shown = (f"--user-data-dir={folder / 'profile'}", f"--screenshot={shot}")
        page = (folder / "step.html").as_uri()
        shooting = [browser, *options, size, *shown, page]
        subprocess.run(shooting, check=True, stderr=subprocess.DEVNULL)
        image = Image.open(shot).convert("RGB")
    empty = Image.new("RGB", image.size, image.getpixel((0, image.height - 1)))
    box = ImageChops.difference(image, empty).getbbox()
    assert box is not None
    cut = image.crop((0, 0, image.width, min(image.height, box[3] + MARGIN)))
    cut.quantize(COLOURS).save(picture, optimize=True)


def main() -> None:
    """Draw all pictures."""
    for name, (script, text) in scripts().items():
        draw(DOCS / "images" / f"{name}.png", script, text)


if __name__ == "__main__":
    main()
