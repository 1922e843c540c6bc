"""A Gemma 4 checkpoint folder, fetched where it is elsewhere, opened and checked before anything costly starts.

    config.json  model-00001-of-0000N.safetensors  model.safetensors.index.json  tokenizer.json  chat_template.jinja

Only headers are read here, so a 62 GB checkpoint opens in milliseconds.
"""

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemsmith.arch import HUB_ID, VARIANTS, Variant, read_variant, text_tensors
from gemsmith.arch.config import differing_fields
from gemsmith.arch.tensors import PREFIX
from gemsmith.checkpoints.peft_config import CONFIG
from gemsmith.checkpoints.safetensors import FLOATS, TensorPlace, count_nonfinite, fingerprint, read_header
from gemsmith.errors import CheckpointError, MachineError, first_line
from gemsmith.system.files import expanduser
from gemsmith.system.json import read_json
from gemsmith.system.storage import Bucket

if TYPE_CHECKING:
    import numpy as np

    from gemsmith.images.patches import PatchConfig

INDEX = "model.safetensors.index.json"
_EMBEDDING, _HEAD = f"{PREFIX}embed_tokens.weight", "lm_head.weight"
_WEIGHTS = "*.safetensors"
_WANTED = ("*.json", "*.jinja", "*.model", "LICENSE*", "NOTICE*", "README.md")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """`places` holds every tensor, those of the vision and audio encoders too."""

    source: str
    folder: Path
    variant: Variant
    config: Mapping[str, Any]
    places: Mapping[str, TensorPlace]

    def read(self, name: str) -> "np.ndarray":
        """The tensor of that name, mapped from its file. Raises CheckpointError where there is none."""
        if name not in self.places:
            raise CheckpointError(f"checkpoint {self.folder}: has no tensor {name}")
        return self.places[name].read()

    def fingerprint(self) -> str:
        """SHA-256 that tells this text model's weights from another's, from a sample of each tensor."""
        return fingerprint({name: place for name, place in self.places.items() if name.startswith(PREFIX)})


def open_checkpoint(source: str, *, variant: Variant | None = None, weights: bool = True) -> Checkpoint:
    """The checkpoint at a folder, a Hugging Face hub id, or gs://bucket/folder.

    Without `weights` those of a checkpoint that is elsewhere are not fetched, and it has no `places`. Raises
    CheckpointError where files are missing or damaged, or tensors not the config's, or that not the `variant`'s.
    """
    folder = fetch_folder(source, weights=weights)
    config = read_config(folder)
    found = name_variant(read_variant(config))
    if variant is not None and (differences := differing_fields(variant, found)):
        why, remedy = ", ".join(differences[:3]), f"leave model out, or name the checkpoint's own ({found.name})"
        raise CheckpointError(f"checkpoint {source}: is not {variant.name}: {why} (recipe != checkpoint); {remedy}")
    places: dict[str, TensorPlace] = {}
    if weights or expanduser(source).is_dir():
        places = _read_places(folder)
        _check_tensors(folder, found, places)
    if (folder / CONFIG).exists():
        why = f"holds {CONFIG}, so that transformers would put that adapter on the weights"
        raise CheckpointError(f"checkpoint {source}: {why}; move it away")
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(f"checkpoint {source}: has no tokenizer.json; copy it from where the weights came from")
    return Checkpoint(source=source, folder=folder, variant=found, config=config, places=places)


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises CheckpointError where it is missing or damaged."""
    file = folder / "config.json"
    try:
        config = read_json(file)
    except FileNotFoundError:
        remedy = "give a folder that holds a Hugging Face checkpoint"
        raise CheckpointError(f"checkpoint {folder}: has no config.json; {remedy}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON ({error})") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: must hold a JSON object")
    return config


def patching_of(folder: Path, image_tokens: int) -> "PatchConfig":
    """How the folder's model cuts images up, into so many soft tokens each at most."""
    from gemsmith.images.patches import read_patching  # here: it loads Pillow

    return read_patching(read_config(folder), image_tokens)


def name_variant(variant: Variant) -> Variant:
    """The variant with the name and hub ids that the zoo has for its text model; else as it is, called `custom`."""
    known = next((known for known in VARIANTS.values() if not differing_fields(known, variant)), variant)
    return replace(variant, name=known.name, hub_ids=known.hub_ids)


def refuse_nonfinite_base(base: Checkpoint, *, consequence: str) -> None:
    """Raises CheckpointError naming the text model's first tensor with NaN or infinity, and its file. Reads all."""
    counts = {tensor.name: count_nonfinite(base.places[tensor.name]) for tensor in text_tensors(base.variant)}
    broken = [name for name, count in counts.items() if count]
    if not broken:
        return
    place, many = base.places[broken[0]], f"; {len(broken)} tensors do" if broken[1:] else ""
    where = f"{broken[0]} in {place.file.name}"
    found = f"NaN or infinity ({counts[broken[0]]:,} of {math.prod(place.shape):,} values{many})"
    raise CheckpointError(f"checkpoint {base.source}: {where} holds {found}, so {consequence}")


def _read_places(folder: Path) -> dict[str, TensorPlace]:
    index, whole = folder / INDEX, folder / "model.safetensors"
    if not index.exists():
        if not whole.exists():
            remedy = "give a folder with safetensors weights"
            raise CheckpointError(f"checkpoint {folder}: has neither {whole.name} nor {INDEX}; {remedy}")
        return read_header(whole)[0]
    try:
        weight_map: dict[str, str] = read_json(index)["weight_map"]
        shards = sorted({os.fspath(shard) for shard in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{index}: is damaged; copy it again") from None
    if whole.exists() and shards != [whole.name]:
        why = f"has {whole.name}, which transformers reads, and beside it {INDEX}, which names others"
        raise CheckpointError(f"checkpoint {folder}: {why}; move one of them away")
    if outside := [shard for shard in shards if Path(shard).name != shard]:
        raise CheckpointError(f"{index}: names {outside[0]}, which lies outside the folder")
    if missing := [shard for shard in shards if not (folder / shard).exists()]:
        raise CheckpointError(
            f"checkpoint {folder}: shard {missing[0]} is missing ({len(missing)} of {len(shards)}); copy it again"
        )
    places: dict[str, TensorPlace] = {}
    for name, place in (entry for shard in shards for entry in read_header(folder / shard)[0].items()):
        if (other := places.setdefault(name, place)) is not place:
            where = f"{other.file.name} and {place.file.name}"
            raise CheckpointError(f"checkpoint {folder}: {name} is in {where}; copy the folder again")
    for name, shard in sorted(weight_map.items()):
        if name not in places or places[name].file.name != shard:
            raise CheckpointError(f"checkpoint {folder}: {shard} lacks {name}, which the index places there")
    return places


def _check_tensors(folder: Path, variant: Variant, places: Mapping[str, TensorPlace]) -> None:
    """Every tensor of the variant is there in its shape, no other text tensor, and no head but the embedding."""
    expected = {tensor.name: tensor for tensor in text_tensors(variant, optional=True)}
    missing = [tensor.name for tensor in expected.values() if not tensor.optional and tensor.name not in places]
    if missing:
        other = "model." + missing[0].removeprefix(PREFIX)  # not just any that ends so: the encoders have layers, too
        hint = f"; {other} is another class's name for it: save the model with its ForConditionalGeneration class"
        what = f"{len(missing)} tensors that do not exist, such as {missing[0]}{hint if other in places else ''}"
        raise CheckpointError(f"checkpoint {folder}: config.json describes {what}")
    for name, place in places.items():
        if name not in expected:
            if name.startswith(PREFIX):
                raise CheckpointError(f"checkpoint {folder}: holds {name}, which config.json does not describe")
            continue
        shape, wanted = list(place.shape), list(expected[name].shape)
        if shape != wanted:
            raise CheckpointError(f"checkpoint {folder}: {name} is {shape}, config.json describes {wanted}")
        if place.dtype not in FLOATS:
            remedy = f"allowed: {', '.join(FLOATS)} (give the weights before quantization)"
            raise CheckpointError(f"checkpoint {folder}: {name} is {place.dtype}; {remedy}")
    head, embedding = places.get(_HEAD), places[_EMBEDDING]
    if head and fingerprint({"": head}) != fingerprint({"": embedding}):
        why, remedy = "to which every Gemma 4's head is tied", "give the checkpoint from before its head was trained"
        raise CheckpointError(f"checkpoint {folder}: {_HEAD} is not {_EMBEDDING}, {why}; {remedy}")


def fetch_folder(source: str, *, weights: bool = True) -> Path:
    """Downloads first where the source is elsewhere. Raises CheckpointError where nothing is there or reached."""
    check_source(source)
    wanted = (*_WANTED, *([_WEIGHTS] if weights else []))
    if "://" in source:
        return _fetch_bucket(source, wanted)
    folder = expanduser(source)
    return folder if folder.is_dir() else _fetch_hub(source, wanted)


def check_source(source: str) -> None:
    """Raises CheckpointError for what is neither a folder that is there nor an address to fetch. Fetches nothing."""
    check_scheme(source)
    if "://" not in source and not expanduser(source).is_dir() and not is_hub_id(source):
        raise CheckpointError(
            f"checkpoint {source!r}: is not a folder, a Hugging Face hub id (owner/name) or gs://bucket/folder"
        )


def is_hub_id(source: str) -> bool:
    """Whether the source has the form owner/name and is no local folder."""
    return bool(HUB_ID.fullmatch(source)) and not expanduser(source).exists()


def check_scheme(source: str) -> None:
    """Raises CheckpointError for an address of a kind that cannot be fetched."""
    scheme, mark, _ = source.partition("://")
    if mark and scheme not in ("gs", "file"):
        remedy = "allowed: gs://bucket/folder, a hub id, a folder"
        raise CheckpointError(f"checkpoint {source}: {scheme}:// is not known; {remedy}")


def _fetch_hub(hub_id: str, patterns: Sequence[str]) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=list(patterns)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {hub_id}: is no folder here and could not be downloaded from the Hugging Face hub "
            f"({first_line(error)}); check the name, accept the model's license and set HF_TOKEN, or give a folder"
        ) from None


def _fetch_bucket(url: str, patterns: Sequence[str]) -> Path:
    """Copies the files of a bucket's folder into the cache, but those whose version is there."""
    cache = expanduser(os.environ.get("GEMSMITH_CACHE", "~/.cache/gemsmith"))
    folder = cache / "checkpoints" / hashlib.sha256(url.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        bucket = Bucket(url)
        names = [name for name in bucket.names() if "/" not in name]
        wanted = [name for name in names if any(Path(name).match(pattern) for pattern in patterns)]
        for name in wanted:
            target, mark, generation = folder / name, folder / f".{name}.generation", bucket.generation(name)
            if not (target.exists() and mark.exists() and mark.read_text() == generation):
                bucket.download(name, target)
                mark.write_text(generation)
    except (MachineError, OSError) as error:
        raise CheckpointError(f"checkpoint {url}: cannot be read: {error}") from None
    if "config.json" not in wanted:
        raise CheckpointError(f"checkpoint {url}: holds no config.json; give the folder of a Hugging Face checkpoint")
    return folder
