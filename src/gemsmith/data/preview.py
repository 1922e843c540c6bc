"""Rows for a person's eyes: what is trained on stands out, so that no mistake in the mask survives."""

from itertools import pairwise

import numpy as np
from rich.console import Console
from rich.text import Text
from tokenizers import Tokenizer

from gemsmith.checkpoints.hub import fetch_folder
from gemsmith.data.batches import open_rows
from gemsmith.data.packing import Rows
from gemsmith.data.tokenize import open_tokenizer, read_image_tokens
from gemsmith.runs.run import Run
from gemsmith.system.characters import escape_control_chars
from gemsmith.system.console import open_console


def show(run: Run, count: int, *, console: Console | None = None) -> None:
    """Prints the first packed rows to stdout: trained tokens in color, or within ⟦ ⟧ where there is no terminal."""
    console = console or open_console(stderr=False)
    rows = open_rows(run)
    folder = fetch_folder(run.recipe.checkpoint)
    tokenizer = open_tokenizer(folder)
    mark = "in color" if console.is_terminal else "within ⟦ ⟧"
    console.print(f"{len(rows)} packed rows of {rows.tokens.shape[1]} tokens; those in the loss are {mark}")
    image = read_image_tokens(folder, tokenizer).image if rows.images else None
    for row in range(min(count, len(rows))):
        console.print(row_text(rows, row, tokenizer, colored=console.is_terminal, image=image))


def row_text(rows: Rows, row: int, tokenizer: Tokenizer, *, colored: bool, image: int | None = None) -> Text:
    """One row: a line for each document, its text, a line for the padding; `image` is a soft token's id.

    ids [2, 105, 9, 7, 106], trained [0, 0, 0, 1, 1] → `<bos><|turn>a⟦b<turn|>⟧`
    """
    documents = rows.documents(row)
    text = Text()
    heading = f"\n━━ row {row + 1}: {len(documents)} documents, {int(rows.loss_mask[row].sum())} trained tokens\n"
    text.append(heading, style="bold")
    for number, places in enumerate(documents, start=1):
        tokens, trained = rows.tokens[row][places], rows.loss_mask[row][places] != 0
        text.append(f"── document {number}: {len(tokens)} tokens, {int(trained.sum())} in the loss\n", style="cyan")
        soft = tokens == (-1 if image is None else image)
        borders = [0, *(np.flatnonzero(np.diff(trained) | np.diff(soft)) + 1).tolist(), len(tokens)]
        for begin, end in pairwise(borders):
            if soft[begin]:
                text.append(f"▣ {end - begin}", style="bold magenta")
                continue
            part = escape_control_chars(tokenizer.decode(tokens[begin:end].tolist(), skip_special_tokens=False))
            if trained[begin]:
                text.append(part if colored else f"⟦{part}⟧", style="bold green")
            else:
                text.append(part, style="dim")
        text.append("" if text.plain.endswith("\n") else "\n")
    if padding := int(np.count_nonzero(rows.segments[row] == 0)):
        text.append(f"── padding: {padding} tokens", style="cyan")
    return text
