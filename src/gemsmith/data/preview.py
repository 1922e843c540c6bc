"""Rows for a person's eyes: what is trained on stands out, so that no mistake in the mask survives."""

from itertools import pairwise

import numpy as np
from rich.console import Console
from rich.text import Text

from gemsmith.checkpoints.folder import fetch_folder
from gemsmith.data.batches import open_rows
from gemsmith.data.tokenize import open_tokenizer, read_image_tokens
from gemsmith.runs.run import Run
from gemsmith.system.characters import escape_control_chars
from gemsmith.system.console import open_console


def show(run: Run, count: int, *, console: Console | None = None) -> None:
    """Prints the first packed rows to stdout: trained tokens in color, or within ⟦ ⟧ where there is no terminal.

    ids [2, 105, 9, 7, 106], trained [0, 0, 0, 1, 1] → `<bos><|turn>a⟦b<turn|>⟧`
    """
    console = console or open_console(stderr=False)
    rows = open_rows(run)
    folder = fetch_folder(run.recipe.checkpoint)
    tokenizer = open_tokenizer(folder)
    mark = "in color" if console.is_terminal else "within ⟦ ⟧"
    console.print(f"{len(rows)} packed rows of {rows.tokens.shape[1]} tokens; those in the loss are {mark}")
    image = read_image_tokens(folder, tokenizer).image if rows.images else -1
    for row in range(min(count, len(rows))):
        documents, in_loss = rows.documents(row), int(rows.loss_mask[row].sum())
        heading = f"\n━━ row {row + 1}: {len(documents)} documents, {in_loss} trained tokens\n"
        text = Text.assemble((heading, "bold"))
        for number, places in enumerate(documents, start=1):
            tokens, trained = rows.tokens[row][places], rows.loss_mask[row][places] != 0
            text.append(f"── document {number}: {len(tokens)} tokens, {int(trained.sum())} in the loss\n", style="cyan")
            soft = tokens == image
            borders = [0, *(np.flatnonzero(np.diff(trained) | np.diff(soft)) + 1).tolist(), len(tokens)]
            for begin, end in pairwise(borders):
                part = escape_control_chars(tokenizer.decode(tokens[begin:end].tolist(), skip_special_tokens=False))
                if soft[begin]:
                    text.append(f"▣ {end - begin}", style="bold magenta")
                elif trained[begin]:
                    text.append(part if console.is_terminal else f"⟦{part}⟧", style="bold green")
                else:
                    text.append(part, style="dim")
            text.append("" if text.plain.endswith("\n") else "\n")
        if padding := int(np.count_nonzero(rows.segments[row] == 0)):
            text.append(f"── padding: {padding} tokens", style="cyan")
        console.print(text)
