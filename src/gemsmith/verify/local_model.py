"""A run's model in this process, by transformers and PEFT: what it answers, without a server."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gemsmith.checkpoints import read_config
from gemsmith.checkpoints.hub import fetch_folder
from gemsmith.checkpoints.peft import read_peft_adapter
from gemsmith.data.chat_template import find_template
from gemsmith.data.dataset import read_messages
from gemsmith.data.documents import Document
from gemsmith.data.reader import ImageSource
from gemsmith.data.tokenize import Renderer, check_prompts, open_renderer
from gemsmith.errors import DataError, InputError, RunError, suggest
from gemsmith.images.check import validate_image
from gemsmith.images.decode import InvalidImageError, make_rgb, read_bytes
from gemsmith.images.patches import PatchConfig, make_patches, read_patching
from gemsmith.runs.records import ExportRecord
from gemsmith.runs.run import Run, is_up_to_date, read_record
from gemsmith.tasks.messages import images_of
from gemsmith.verify.logits import load_model, load_peft, quiet

WEIGHTS = ("base", "adapter", "merged")
_ANSWER = "-"
"""Stands for the answer, which a row must have."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalModel:
    """Answers one conversation at a time. `model` is that of transformers, or PEFT's around it."""

    model: Any
    renderer: Renderer
    patching: PatchConfig

    def generate(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        images: Sequence[Path | str | bytes] = (),
        *,
        max_new_tokens: int = 256,
        **options: Any,
    ) -> str:
        """The answer to a text, or to messages `{"role": ..., "content": ...}`, rendered by the run's chat template.

        Images are paths or bytes: before the text, or where the messages have `{"type": "image"}`. The likeliest token
        is taken, unless options of transformers' generate, such as `do_sample=True`, say otherwise. Raises DataError
        for messages or images that no row may have.
        """
        row: dict[str, Any] = {"prompt": prompt, "response": _ANSWER}
        if not isinstance(prompt, str):
            row = {"messages": [*prompt, {"role": "assistant", "content": _ANSWER}]}
        form = "messages" if "messages" in row else "prompt-response"
        row["images"] = [os.fspath(image) for image in images]
        inputs = self._inputs(Document(messages=read_messages(row, "generate", form, ImageSource()), origin="generate"))
        with quiet():
            found = self.model.generate(**inputs, **{"do_sample": False, "max_new_tokens": max_new_tokens} | options)
        answer = found[0, inputs["input_ids"].shape[1] :].tolist()
        return self.renderer.tokenizer.decode(answer, skip_special_tokens=True)

    def _inputs(self, document: Document) -> dict[str, Any]:
        """The tensors of the prompt, a batch of one, on the model's device; N images of up to P patches.

        input_ids and attention_mask (1, L); with images mm_token_type_ids (1, L), of which 1 is a soft token,
        pixel_values (N, P, dimension) and image_position_ids (N, P, 2).
        """
        import torch

        parts, seen, patches = images_of(document.messages), [], []
        try:
            for part in parts:
                data = part.data or read_bytes(part.path)
                seen.append(validate_image(data, self.patching))
                patches.append(make_patches(make_rgb(data), self.patching))
        except InvalidImageError as bad:
            raise DataError(f"generate: image {len(seen) + 1} {bad.line}; give another") from None
        [ids] = check_prompts(self.renderer, [(replace(document, images=tuple(seen)), len(document.messages) - 1)])
        arrays = {"input_ids": ids[None].astype(np.int64), "attention_mask": np.ones((1, len(ids)), np.int64)}
        if patches:
            most = max(len(image.values) for image in patches)
            values, positions = zip(*(image.padded(most) for image in patches), strict=True)
            arrays["mm_token_type_ids"] = (arrays["input_ids"] == self.renderer.image_tokens().image).astype(np.int64)
            arrays |= {"pixel_values": np.stack(values), "image_position_ids": np.stack(positions).astype(np.int64)}
        return {name: torch.from_numpy(array).to(self.model.device) for name, array in arrays.items()}


def load_local_model(run: Run, weights: str) -> LocalModel:
    """The run's base, base with adapter, or merged weights, in the checkpoint's dtype, on the GPU or else the CPU.

    Raises InputError for other weights than these, RunError where they are not exported or were exported from other
    settings, and CheckpointError where transformers or PEFT cannot load them.
    """
    import torch

    if weights not in WEIGHTS:
        raise InputError(f"load_model: {weights!r} was given{suggest(weights, WEIGHTS)}; allowed: {', '.join(WEIGHTS)}")
    if weights != "base":
        read_record(run, ExportRecord)
        if not is_up_to_date(run, "export"):
            raise RunError(
                f"{run.record_file('export')}: was made from other settings; run first: gemsmith export {run.path}"
            )
    folder = run.merged if weights == "merged" else fetch_folder(run.recipe.checkpoint)
    with quiet():
        model = load_model(folder, "auto")
        if weights == "adapter":
            model = load_peft(model, run.adapter, read_peft_adapter(run.adapter))
    return LocalModel(
        model=model.to("cuda" if torch.cuda.is_available() else "cpu"),
        renderer=open_renderer(folder, find_template(folder, run.recipe.data.template)),
        patching=read_patching(read_config(folder), run.recipe.data.image_tokens),
    )
