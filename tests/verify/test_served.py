"""What is concluded from two servers' answers; and, with the real vLLM, that it applies every adapter of K = V
layers."""

import dataclasses
import json
from pathlib import Path

import pytest

from gemsmith.errors import EngineError, MachineError, VerifyError
from gemsmith.export.stage import export
from gemsmith.runs.records import Check
from gemsmith.runs.run import ExportDir
from gemsmith.serve.client.chat import AnswerTokens
from gemsmith.serve.settings import find_vllm
from gemsmith.verify import served
from gemsmith.verify.served import _agrees, _ask, _differs, gap_at_parting, verify_served
from gemsmith.verify.stage import verify


def reply(text: str, **top: float) -> AnswerTokens:
    """Tokens are letters; each place's likeliest are the letter itself at -0.1, and what `top` says."""
    return AnswerTokens(
        tokens=tuple(text),
        top=tuple({letter: -0.1} | {key: value for key, value in top.items() if key != letter} for letter in text),
    )


def test_equal_answers_have_no_gap():
    assert gap_at_parting(reply("abc"), reply("abc")) == 0


def test_the_gap_is_the_larger_of_both_at_the_first_token_that_differs():
    assert gap_at_parting(reply("abx", y=-0.3), reply("aby", x=-0.5)) == pytest.approx(0.4)


def test_a_token_that_the_other_never_thought_of_is_as_far_as_its_least_likely():
    assert gap_at_parting(reply("abx", q=-7.0), reply("aby", x=-0.2)) == pytest.approx(6.9)


def test_an_answer_that_ends_earlier_is_another():
    assert gap_at_parting(reply("ab"), reply("abc")) == float("inf")


def test_a_tuned_model_that_answers_as_the_base_fails():
    assert not _differs([reply("ab"), reply("cd")], [reply("ab"), reply("cd")]).passed
    assert _differs([reply("ab"), reply("cd")], [reply("ab"), reply("ce")]).passed


def test_an_adapter_that_answers_otherwise_fails_and_says_what_to_do():
    near, far = reply("abx", y=-0.2), reply("abx", y=-3.0)
    tuned = reply("aby", x=-0.2)
    assert _agrees([near, reply("q")], [tuned, reply("q")], 0.3).passed
    check = _agrees([far, reply("q")], [tuned, reply("q")], 0.3)
    assert not check.passed and "1 of 2" in check.detail and "serve the merged weights" in check.detail


@pytest.mark.parametrize(("dtype", "compared"), [("bfloat16", True), ("nf4", False)])
def test_an_adapter_on_the_original_base_is_not_compared_with_what_was_merged_into_another(
    exported, monkeypatch, capsys, dtype, compared
):
    train = exported.recipe.train.model_copy(update={"dtype": dtype})
    run = dataclasses.replace(exported, recipe=exported.recipe.model_copy(update={"train": train}))
    export(run)
    verify(run)
    both = tuple(Check(name=name, passed=name == "served", detail="") for name in ("served", "served adapter"))
    monkeypatch.setattr(served, "check_served", lambda *_, **__: both)
    monkeypatch.setattr(served, "trained_rows", lambda _: None)
    if compared:
        with pytest.raises(VerifyError, match="served adapter"):
            served.verify_served(run)
    else:
        record = served.verify_served(run)
        assert record.passed and record.checks[-1].passed is None
        assert "the adapter's server the original" in record.checks[-1].detail
        assert "not done served adapter" in capsys.readouterr().err


def completion(**choice):
    return 200, json.dumps({"choices": [{"text": "ab", "finish_reason": "length"} | choice]}).encode()


def test_both_ways_in_which_log_probabilities_are_written_are_read(hostile):
    ids = {"tokens": ["a", "b"], "top_logprobs": [{"a": -0.1, "b": -1}, {"b": -0.2}]}
    chats = {
        "content": [{"token": "a", "top_logprobs": [{"token": "a", "logprob": -0.1}, {"token": "b", "logprob": -1}]}]
    }
    hostile.deed = lambda asked: completion(logprobs=ids if "prompt" in asked else chats)
    answers = _ask(hostile.server(), "base", [[1, 2], [{"role": "user", "content": "x"}]])
    assert answers[0] == AnswerTokens(tokens=("a", "b"), top=({"a": -0.1, "b": -1}, {"b": -0.2}))
    assert answers[1] == AnswerTokens(tokens=("a",), top=({"a": -0.1, "b": -1},))
    assert [asked["model"] for asked in hostile.asked] == ["base", "base"]


@pytest.mark.parametrize(("deed", "reason"), [
    ((400, b"too long"), "http 400: too long"),
    ((200, b"<html>"), "not JSON: <html>"),
    ((200, b"{}"), "no choices"),
    (completion(), "no log-probabilities"),
    (completion(logprobs=None), "no log-probabilities"),
    (completion(logprobs=[]), "no log-probabilities"),
    (completion(logprobs={"tokens": ["a"], "top_logprobs": [None]}), "no log-probabilities"),
    (completion(logprobs={"tokens": ["a"], "top_logprobs": []}), "no log-probabilities"),
    (completion(logprobs={"tokens": ["a"], "top_logprobs": [{"b": -1}]}), "no log-probabilities"),
    (completion(logprobs={"tokens": ["a"], "top_logprobs": [{"a": float("nan")}]}), "no log-probabilities"),
    (completion(logprobs={"content": [{"token": "a"}]}), "no log-probabilities"),
    (completion(finish_reason="abort"), "finish_reason abort"),
])  # fmt: skip
def test_an_answer_that_cannot_be_compared_is_one_line(deed, reason, hostile):
    hostile.deed = lambda _asked: deed
    with pytest.raises(
        EngineError, match=rf"^vLLM at http://[^ ]* answered [\w-]+ with {reason}[^\n]*; its log is vllm\.log$"
    ):
        _ask(hostile.server(), "base", [[1, 2]])


@pytest.mark.vllm
class TestWithVllm:
    @pytest.fixture(autouse=True)
    def _needs_vllm(self):
        try:
            find_vllm()
        except MachineError as error:
            pytest.skip(str(error))

    @pytest.fixture
    def exported(self, tiny_checkpoint, tmp_path) -> Path:
        """An export of a random adapter of tiny-31b, in which two layers have K = V."""
        import numpy as np

        from gemsmith.arch import find_variant, lora_targets
        from gemsmith.checkpoints.peft import Adapter, LoraPair, write_peft_adapter
        from gemsmith.export.stage import export_peft

        random, modules = np.random.default_rng(0), {}
        for target in lora_targets(find_variant("tiny-31b")):
            out, inner = target.shape
            a, b = random.uniform(-1, 1, (4, inner)) / np.sqrt(inner), 0.1 * random.standard_normal((out, 4))
            modules[target.module] = LoraPair(a=a.astype(np.float32), b=b.astype(np.float32))
        write_peft_adapter(Adapter(modules=modules, rank=4, alpha=8.0), tmp_path / "adapter", "base")
        export_peft(str(tiny_checkpoint("tiny-31b", "float32")), tmp_path / "adapter", tmp_path / "out")
        return tmp_path / "out"

    def test_vllm_answers_the_same_with_the_adapter_and_the_merged_weights(self, exported):
        verify(ExportDir(path=exported))
        record = verify_served(ExportDir(path=exported))
        assert [check.name for check in record.checks[-2:]] == ["served", "served adapter"] and record.passed
        assert record.checks[-1].detail.startswith("3 of 3")
        assert json.loads((exported / "verify.json").read_text())["checks"][-1]["passed"]

    def test_vllm_gives_v_no_adapter_unless_k_is_written_again_for_it(self, exported):
        """Why exported adapters have a v_proj that PEFT does not know; once this test fails, vLLM no longer needs
        it."""
        from gemsmith.checkpoints.peft import read_peft_adapter, write_peft_adapter

        verify(ExportDir(path=exported))
        adapter = read_peft_adapter(exported / "adapter")
        kept = dataclasses.replace(adapter, modules=dict(adapter.modules.items()))
        write_peft_adapter(kept, exported / "adapter", "base")
        with pytest.raises((VerifyError, EngineError), match="serve the merged weights"):
            verify_served(ExportDir(path=exported))
