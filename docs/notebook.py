"""Writes pages as notebooks: `python docs/notebook.py`. The code cells are the Python blocks of a page."""

import json
import re
from pathlib import Path

DOCS = Path(__file__).parent
PAGES = ("tutorial", "recipes", "coming-from")


def notebook(page: str) -> str:
    """A page of Markdown as a notebook. Python blocks become code cells. Text between Python blocks becomes cells of text."""
    cells = []
    for number, part in enumerate(re.split(r"```python\n(.*?)```\n", page, flags=re.DOTALL)):
        if source := part.strip("\n"):
            kind = {"cell_type": "code", "execution_count": None, "outputs": []} if number % 2 else {"cell_type": "markdown"}
            cells.append({"id": f"cell-{len(cells)}", "metadata": {}, "source": source.splitlines(keepends=True), **kind})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return json.dumps({"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / f"{name}.ipynb").write_text(notebook((DOCS / f"{name}.md").read_text()))
