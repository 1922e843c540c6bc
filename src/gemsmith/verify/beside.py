"""What lies beside the weights of a merged folder: tokenizer, chat template, processor, configs, byte for byte."""

import filecmp

from gemsmith.checkpoint import Checkpoint
from gemsmith.export.merge import files_to_write


def compare_beside(base: Checkpoint, merged: Checkpoint) -> list[str]:
    """Files that are missing, too many, or not the base's, by name; tensors are compared elsewhere."""
    shards = {place.file.name for checkpoint in (base, merged) for place in checkpoint.places.values()}
    expected = {file.name: file for file in files_to_write(base)}
    there = {str(path.relative_to(merged.folder)) for path in merged.folder.rglob("*") if not path.is_dir()}
    problems = [f"{name} is missing" for name in sorted(expected.keys() - there - shards)]
    problems += [f"{name} is not in the base" for name in sorted(there - expected.keys() - shards)]
    return problems + [
        f"{name} is not the base's"
        for name in sorted((expected.keys() & there) - shards)
        if not filecmp.cmp(expected[name], merged.folder / name, shallow=False)
    ]
