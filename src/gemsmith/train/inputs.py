"""What training starts from, alike in each backend; what images ask of a checkpoint; held-out prompts and answers.

Adapters start as PEFT draws them, or as those of `train.init_adapter`. No machine-learning library is imported.
"""

import itertools
import json
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from gemsmith.arch import ALL_LINEAR, VARIANTS, VISION, Tensor, Variant, lora_targets, vision_targets
from gemsmith.checkpoints.folder import Checkpoint, open_checkpoint
from gemsmith.checkpoints.peft import WEIGHTS, Adapter, LoraPair, check_finite, check_fit, read_peft_adapter
from gemsmith.data.batches import EVAL_ROWS, Batches, open_rows
from gemsmith.data.chat_template import SPECIAL_IDS
from gemsmith.data.images import decode_batches
from gemsmith.data.packing import ARRAYS, Rows
from gemsmith.data.tokenize import open_tokenizer
from gemsmith.errors import CheckpointError, GemsmithError, RecipeError
from gemsmith.images.patches import PatchConfig, Patches, longest_line, read_patching
from gemsmith.recipe.backends import ANSWER_TOKENS
from gemsmith.recipe.schema import Data, Lora, Recipe
from gemsmith.runs.records import DataRecord, SampleAnswer
from gemsmith.runs.run import Run, read_record
from gemsmith.system.files import sha256_file


def name_number(tensor: Tensor) -> int:
    """A number that stands for the tensor in random keys, the same in every process and whatever else is adapted."""
    return zlib.crc32(tensor.name.encode())


def first_pair(tensor: Tensor, rank: int, seed: int, adapter: Adapter | None = None) -> LoraPair:
    """The A (R, in) and B (out, R) that the tensor's adapter starts from: those of the given adapter, or new ones.

    New, A is uniform in ±1/sqrt(in), float32, a function of the seed and the tensor's name, and B is zero.
    """
    if adapter is not None:
        return adapter.modules[tensor.module]
    outputs, inputs = tensor.shape
    random = np.random.Generator(np.random.Philox(key=[seed % 2**64, name_number(tensor)]))
    a = ((random.random((inputs, rank), dtype=np.float32) * 2 - 1) * (1.0 / np.sqrt(inputs))).astype(np.float32)
    return LoraPair(a=a.T, b=np.zeros((outputs, rank), np.float32))


def open_base(run: Run) -> Checkpoint:
    """The checkpoint that is trained. Raises CheckpointError where it is another than when its rows were made."""
    base = open_checkpoint(run.recipe.checkpoint, variant=VARIANTS.get(run.recipe.model or ""))
    if read_record(run, DataRecord).provenance.inputs_sha256.get("checkpoint") not in (None, base.fingerprint()):
        way = f"start again with: gemsmith data {run.path} --force, then: gemsmith train {run.path} --force"
        raise CheckpointError(f"checkpoint {base.source}: has changed since its rows were made; put it back, or {way}")
    return base


def load_init_adapter(recipe: Recipe, variant: Variant) -> Adapter | None:
    """The adapter of train.init_adapter, None where the recipe names none.

    Raises RecipeError for another rank or scale than lora says, CheckpointError for modules or shapes that are not
    those of model and lora.targets, for values that are NaN or infinite, and for a folder that cannot be read.
    """
    folder = recipe.train.init_adapter
    if folder is None:
        return None
    adapter, lora = read_peft_adapter(Path(folder)), recipe.lora
    for key in ("rank", "alpha", "rslora"):
        found, wanted = getattr(adapter, key), getattr(lora, key)
        if found != wanted:
            # All digits of a number, so that what is asked for is what is found.
            found, wanted = (json.dumps(value).removesuffix(".0") for value in (found, wanted))
            raise RecipeError(
                f"train.init_adapter: {folder} has {key} {found}, lora.{key} is {wanted}; set lora.{key}={found}"
            )
    source = f"{folder} (train.init_adapter)"
    check_fit(adapter, lora_targets(variant, lora.targets), source=source)
    check_finite(adapter, source=source, otherwise="start from another")
    return adapter


def start_adapter_hash(recipe: Recipe) -> str | None:
    """SHA-256 of the weights of train.init_adapter."""
    folder = recipe.train.init_adapter
    return None if folder is None else sha256_file(Path(folder) / WEIGHTS)


def check_patching(checkpoint: Checkpoint, batches: Batches, data: Data, lora: Lora) -> PatchConfig | None:
    """How the rows' images are cut up; None where no row has any.

    Raises RecipeError for adapters on what no row would train, CheckpointError for a checkpoint that takes none, or has
    fewer positions than an image has patches.
    """
    variant = checkpoint.variant
    if not batches.rows.images:
        if vision_targets(variant, lora.targets):
            named = next(kind for kind in lora.targets if kind in (VISION, ALL_LINEAR))
            raise RecipeError(
                f"lora.targets: {named} adapts what embeds images, and no row of data.train has one; take it out"
            )
        return None
    if variant.vision is None:
        raise CheckpointError(
            f"checkpoint {checkpoint.source}: its config.json has no vision_config, and rows of data.train have "
            "images; give one that takes images"
        )
    patching = read_patching(checkpoint.config, data.image_tokens)
    for image in itertools.chain.from_iterable(batches.rows.images):
        longest, positions = longest_line(image.width, image.height, patching), variant.vision.positions
        if longest > positions:
            raise CheckpointError(
                f"{image.path}: has {longest} patches in a line, and checkpoint {checkpoint.source} positions for "
                f"{positions}; read the rows again with: gemsmith data RUN --force"
            )
    return patching


class ImageFeed:
    """Some rows of the batch of each step from `first` on, with the images of each row, decoded ahead in processes.

    `fault`: why the batch of `step` cannot be had, such as an image that is gone. It is known so many steps `ahead` of
    when that batch is asked for.
    """

    def __init__(
        self, batches: Batches, patching: PatchConfig, *, rows: Sequence[int], first: int, processes: int, ahead: int
    ) -> None:
        self.fault: GemsmithError | None = None
        self.step, self._ahead = first, ahead
        self._ready: deque[tuple[Rows, list[list[Patches]]]] = deque()
        steps = range(first, batches.steps + 1)
        self._decoded = decode_batches(batches, steps, patching, processes=processes, rows=rows)
        self._fill()

    def take(self) -> tuple[Rows, list[list[Patches]]] | None:
        """The next step's; None after the last, or where it cannot be had."""
        self._fill()
        return self._ready.popleft() if self._ready else None

    def close(self) -> None:
        self._decoded.close()

    def _fill(self) -> None:
        while len(self._ready) <= self._ahead:
            try:
                self._ready.append(next(self._decoded))
            except StopIteration:
                return
            except GemsmithError as error:
                self.fault = error
                return
            self.step += 1


Answers = tuple[SampleAnswer, ...]
_PROMPT_CHARACTERS = 1000


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplePrompts:
    """Prompts of held-out rows, each a row of `batches` with room behind it, and what they should be answered.

    A token of the answers takes a forward pass over whole rows, as in an evaluation: keys and values that are kept
    would save work, but take memory that no plan knows of, and weights that are split are gathered all the same.
    """

    batches: Batches
    lengths: tuple[int, ...]  # tokens of each prompt
    expected: tuple[np.ndarray, ...]
    tokenizer: Tokenizer
    image_token: int
    stops: frozenset[int]

    def answer(self, batches: Iterable[tuple], next_tokens: Callable[..., np.ndarray | None]) -> Answers | None:
        """The greedy answers to the prompts of these batches, each its number, from 1, and what else is read of it.

        `next_tokens` is given all that, tokens (B, L) and a mask (B, L), and gives the most likely one after that which
        the mask marks in each row, (B,). None where it gives None, since it is told to stop.
        """
        found: list[SampleAnswer] = []
        for number, *read in batches:
            first, batch = (number - 1) * self.batches.global_batch_size, self.batches.batch(number)
            tokens, lengths = batch.tokens, self.lengths[first : first + len(batch)]
            most = [min(ANSWER_TOKENS, tokens.shape[1] - length) for length in lengths]
            answers: list[list[int]] = [[] for _ in lengths]
            while left := [k for k, ids in enumerate(answers) if len(ids) < most[k] and self.stops.isdisjoint(ids)]:
                mask = np.zeros_like(batch.loss_mask)
                for row, ids in enumerate(answers):
                    mask[row, lengths[row] + len(ids) - 1] = 1
                predicted = next_tokens(number, *read, tokens, mask)
                if predicted is None:
                    return None
                for row in left:
                    tokens[row, lengths[row] + len(answers[row])] = predicted[row]
                    answers[row].append(int(predicted[row]))
            for row, (length, ids) in enumerate(zip(lengths, answers, strict=True)):
                prompt, expected = self._text(tokens[row][:length].tolist()), self.expected[first + row].tolist()
                prompt = prompt if len(prompt) <= _PROMPT_CHARACTERS else f"…{prompt[-_PROMPT_CHARACTERS:]}"
                answer, expected = self._answer_text(ids), self._answer_text(expected)
                found.append(SampleAnswer(prompt=prompt, expected=expected, answer=answer))
        return tuple(found)

    def _answer_text(self, ids: list[int]) -> str:
        """Without the token that ends it; with … where none does."""
        some = ids[:ANSWER_TOKENS]
        return self._text(some[:-1]) if some[-1] in self.stops else f"{self._text(some)}…"

    def _text(self, ids: list[int]) -> str:
        """The soft tokens of an image as one."""
        kept = (one for before, one in itertools.pairwise([-1, *ids]) if not one == before == self.image_token)
        return self.tokenizer.decode([*kept], skip_special_tokens=False)


def load_samples(run: Run, checkpoint: Checkpoint, *, parts: int, most: int, multiple: int = 1) -> SamplePrompts | None:
    """The prompts of train.sample_answers documents of data.eval, evenly spread over all; None where it is 0.

    Each is what comes before the document's first answer. Batches are split over so many `parts`, of which each has at
    most `most` rows at a time, as long as a `multiple` of tokens, but no longer than data.max_length.
    """
    wanted = run.recipe.train.sample_answers
    if not (wanted and run.recipe.train.eval_steps):
        return None
    rows, image_token = open_rows(run, EVAL_ROWS), checkpoint.config.get("image_token_id", -1)
    ends = np.cumsum(rows.segments.max(axis=1))  # of each row's documents
    prompts, expected, images = [], [], []
    for document in sorted({(2 * number + 1) * int(ends[-1]) // (2 * wanted) for number in range(wanted)}):
        row = int(np.searchsorted(ends, document, side="right"))
        place = rows.documents(row)[document - int(ends[row])]
        tokens, trained = np.array(rows.tokens[row]), np.array(rows.loss_mask[row][place])
        begin = place.start + int(trained.argmax())
        end = begin + int(np.append(trained[begin - place.start :], 0).argmin())
        prompts.append(tokens[place.start : begin])
        expected.append(tokens[begin:end])
        before, behind = (np.count_nonzero(tokens[:border] == image_token) for border in (place.start, begin))
        of_row = rows.images[row] if rows.images else ()
        starts = itertools.accumulate((image.soft_tokens for image in of_row), initial=0)
        images.append(tuple(image for start, image in zip(starts, of_row, strict=False) if before <= start < behind))
    size, length = parts * min(most, -(-len(prompts) // parts)), max(map(len, prompts)) + ANSWER_TOKENS
    packed = prompt_rows(prompts, min(run.recipe.data.max_length, -(-length // multiple) * multiple))
    return SamplePrompts(
        batches=Batches(
            global_batch_size=size,
            total_rows=len(prompts),
            rows=replace(packed, images=tuple(images) if any(images) else ()),
            order=range(len(prompts)),
        ),
        lengths=tuple(map(len, prompts)),
        expected=tuple(expected),
        tokenizer=open_tokenizer(checkpoint.folder),
        image_token=image_token,
        # A soft token without an image cannot be gone on from.
        stops=frozenset({image_token, *(SPECIAL_IDS[name] for name in ("<eos>", "<turn|>", "<|tool_response>"))}),
    )


def prompt_rows(prompts: Sequence[np.ndarray], length: int) -> Rows:
    """A row for each prompt, of one document as long as the row: nothing sees what is behind it.

    prompts [2 5], [2], length 4  →  tokens 2 5 0 0, 2 0 0 0; segments of 1; positions 0 1 2 3
    """
    arrays = {name: np.zeros((len(prompts), length), kind) for name, kind in ARRAYS.items()}
    arrays["segments"] += 1
    arrays["positions"] += np.arange(length, dtype=np.int32)
    for row, prompt in zip(arrays["tokens"], prompts, strict=True):
        row[: len(prompt)] = prompt
    return Rows(**arrays, images=())
