"""A run's model in this process, by transformers and PEFT: what it answers, without a server."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gemsmith.arch.lora_targets import KINDS
from gemsmith.checkpoints.folder import fetch_folder, patching_of
from gemsmith.checkpoints.peft import read_peft_adapter
from gemsmith.data.chat_template import find_template
from gemsmith.data.documents import Document
from gemsmith.data.forms import FORMS, read_document
from gemsmith.data.parts import ImageSource
from gemsmith.data.tokenize import Renderer, check_prompts, open_renderer
from gemsmith.errors import DataError, InputError, RunError, suggest
from gemsmith.images.check import validate_image
from gemsmith.images.decode import InvalidImageError, make_rgb, read_bytes
from gemsmith.images.patches import PatchConfig, make_patches
from gemsmith.runs.records import ExportRecord
from gemsmith.runs.run import Run, is_up_to_date, read_record
from gemsmith.tasks.messages import images_of
from gemsmith.train.torch.images import pad_images
from gemsmith.train.torch.upstream import quiet
from gemsmith.verify.logits import load_model, load_peft

WEIGHTS = ("base", "adapter", "merged")


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

        Images are paths or bytes: before the text, or where the messages have `{"type": "image"}`. It is greedy, unless
        options of transformers' generate, such as `do_sample=True`, say otherwise. Raises DataError.
        """
        import torch

        if isinstance(prompt, str):
            prompt = [
                {"role": "user", "content": [*[{"type": "image"}] * len(images), {"type": "text", "text": prompt}]}
            ]
        answered = [*prompt, {"role": "assistant", "content": "-"}]  # as a row, which is then checked like any
        row = {"messages": answered, "images": [os.fspath(image) for image in images]}
        messages = read_document(row, "generate", FORMS["messages"], ImageSource(), {}).messages
        try:
            each = [part.data or read_bytes(part.path) for part in images_of(messages)]
            seen = tuple(validate_image(data, self.patching) for data in each)
            patches = [make_patches(make_rgb(data), self.patching) for data in each]
        except InvalidImageError as bad:
            raise DataError(f"generate: an image {bad.line}; give another") from None
        document = Document(messages=messages, origin="generate", images=seen)
        [ids] = check_prompts(self.renderer, [(document, len(messages) - 1)])
        tokens = torch.from_numpy(ids.astype(np.int64))[None]
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if patches:
            inputs |= pad_images([patches])
            inputs["mm_token_type_ids"] = (tokens == self.renderer.image_tokens().image).long()
        inputs = {name: tensor.to(self.model.device) for name, tensor in inputs.items()}
        with quiet():
            found = self.model.generate(**inputs, **{"do_sample": False, "max_new_tokens": max_new_tokens} | options)
        return self.renderer.tokenizer.decode(found[0, len(ids) :].tolist())


def load_local_model(run: Run, weights: str) -> LocalModel:
    """The run's base, base with adapter, or merged weights, in the checkpoint's dtype, on the GPU or else the CPU.

    Raises RunError where they are not exported, or were from other settings, InputError for the adapter of a quantized
    base, and CheckpointError for what transformers or PEFT cannot load.
    """
    import torch

    if weights not in WEIGHTS:
        raise InputError(f"load_model: {weights!r} was given{suggest(weights, WEIGHTS)}; allowed: {', '.join(WEIGHTS)}")
    if weights != "base" and read_record(run, ExportRecord) and not is_up_to_date(run, "export"):
        raise RunError(f"{run.record_file('export')}: was made from other settings; run: gemsmith export {run.path}")
    if weights == "adapter" and run.recipe.train.method == "full":
        raise InputError("load_model: 'adapter' was given, and train.method full makes none; give 'merged'")
    if weights == "adapter" and run.recipe.train.dtype in KINDS:
        raise InputError(
            f"load_model: the adapter was trained on a base in {run.recipe.train.dtype}, and would be on the original "
            "weights here; give 'merged'"
        )
    folder = run.merged if weights == "merged" else fetch_folder(run.recipe.checkpoint)
    with quiet():
        model = load_model(folder, "auto")
        if weights == "adapter":
            model = load_peft(model, run.adapter, read_peft_adapter(run.adapter))
    return LocalModel(
        model=model.to("cuda" if torch.cuda.is_available() else "cpu"),
        renderer=open_renderer(folder, find_template(folder, run.recipe.data)),
        patching=patching_of(folder, run.recipe.data.image_tokens),
    )
