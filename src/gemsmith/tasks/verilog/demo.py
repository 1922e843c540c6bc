"""The demo's task: a small family of hardware specifications with one canonical Verilog module each, made from a seed.

Its scorer `verilog-exact` compares the modules without comments and spacing, so it needs no simulator. Which split a
specification belongs to is a function of its own text alone: the splits share none, whatever seed and rows.
"""

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from gemsmith.tasks.base import Question, Verdict

WORDS = tuple(
    "alu bus bit byte chip clock code core data edge fast fifo gate half hold host iron jump keep lane latch link "
    "logic lower main mask mem mix mode net next node pack path pin pipe port pulse quick read ring route scan shift "
    "side slow stage state sync tap tiny top track unit upper vec wide wire word zero".split()
)
PORTS = tuple("a b c d e f g h k m n p r s t u v w x y z left right first second value item arg op lhs rhs".split())
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
HELD_OUT_SHARE = 0.1
COLUMNS: tuple[str, ...] = ()

BITWISE = {"AND": "&", "OR": "|", "XOR": "^"}
ARITHMETIC = {"sum": "+", "difference": "-", "product": "*"}
COMPARISONS = {"equal to": "==", "less than": "<", "greater than": ">"}
_OPERATORS = BITWISE | ARITHMETIC | COMPARISONS | {"left": "<<", "right": ">>", "": ""}
_SENTENCES = {
    "bitwise": "{result} is the bitwise {operator} of {0} and {1}.",
    "not": "{result} is the bitwise NOT of {0}.",
    "arithmetic": "{result} is the {operator} of {0} and {1}.",
    "compare": "{result} is 1 when {0} is {operator} {1}.",
    "shift": "{result} is {0} shifted {operator} by {amount}.",
    "select": "{result} is {1} when {0} is 1, otherwise {2}.",
    "register": "{result} takes {2} at each rising edge of {0} and is cleared when {1} is 1.",
}
_EXPRESSIONS = dict.fromkeys(("bitwise", "arithmetic", "compare"), "{0} {operator} {1}") | {
    "not": "~{0}", "shift": "{0} {operator} {amount}", "select": "{0} ? {1} : {2}",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One module. `inputs` are (name, width in bits); `form` says how the output follows from them."""

    name: str
    inputs: tuple[tuple[str, int], ...]
    output: tuple[str, int]
    form: str
    operator: str = ""
    amount: int = 0

    @property
    def operands(self) -> list[str]:
        return [name for name, _ in self.inputs]


def generate_rows(rows: int, split: str, seed: int) -> list[dict[str, str]]:
    """`rows` different rows {"prompt", "response"} of a split, "train" or "held-out".

    >>> generate_rows(1, "train", 0)[0]["response"].startswith("module ")
    True
    """
    made: dict[str, dict[str, str]] = {}
    for spec in make_specs(split, seed):
        row = {"prompt": write_prompt(spec), "response": write_module(spec)}
        made.setdefault(row["prompt"], row)
        if len(made) == rows:
            break
    return list(made.values())


def score(question: Question, answers: Sequence[str]) -> list[Verdict]:
    """A verdict for each answer: right where its modules are the expected ones."""
    expected = normalise_module(question.expected)
    return [Verdict(right=normalise_module(answer) == expected) for answer in answers]


def make_specs(split: str, seed: int) -> Iterator[Spec]:
    """An endless stream of specifications of one split."""
    source = random.Random(f"{split} {seed}")
    while True:
        spec = _draw_spec(source)
        if split_of(spec) == split:
            yield spec


def split_of(spec: Spec) -> str:
    digest = hashlib.sha256(write_module(spec).encode()).digest()
    return "held-out" if int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32 else "train"


def write_prompt(spec: Spec) -> str:
    return f"Write a Verilog module {describe(spec)}"


def describe(spec: Spec) -> str:
    """The specification in English, from `named` on."""
    ports = ", ".join(f"{width}-bit input {name}" for name, width in spec.inputs)
    result, width = spec.output
    follows = _SENTENCES[spec.form].format(*spec.operands, result=result, operator=spec.operator, amount=spec.amount)
    return f"named {spec.name} with {ports} and {width}-bit output {result}. {follows}"


def expression(spec: Spec) -> str:
    """What the output of a combinational module equals: the same in Verilog and in C."""
    operator = _OPERATORS[spec.operator]
    return _EXPRESSIONS[spec.form].format(*spec.operands, operator=operator, amount=spec.amount)


def write_module(spec: Spec) -> str:
    ports = ", ".join(f"input {_range(width)}{name}" for name, width in spec.inputs)
    name, width = spec.output
    if spec.form == "register":
        clock, reset, data = spec.operands
        kind = "output reg"
        body = f"always @(posedge {clock})\n    if ({reset}) {name} <= 0;\n    else {name} <= {data};"
    else:
        kind, body = "output", f"assign {name} = {expression(spec)};"
    return f"module {spec.name}({ports}, {kind} {_range(width)}{name});\n  {body}\nendmodule"


def normalise_module(text: str) -> str:
    r"""The modules in a text without comments, and with white space only where two words would touch.

    >>> normalise_module("Sure:\n```\nmodule m ( input a ); // one\nendmodule\n```")
    'module m(input a);endmodule'
    """
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
    found = re.search(r"\bmodule\b.*\bendmodule\b", text, flags=re.DOTALL)
    code = re.sub(r"\s+", " ", found.group() if found else text).strip()
    return re.sub(r" ?([^\w\s$`]) ?", r"\1", code)


def _range(width: int) -> str:
    return "" if width == 1 else f"[{width - 1}:0] "


def _draw_spec(source: random.Random) -> Spec:
    form = source.choice(("bitwise", "not", "arithmetic", "compare", "shift", "select", "register"))
    width = source.choice(WIDTHS)
    name = f"{source.choice(WORDS)}_{source.choice(WORDS)}"
    ports = source.sample(PORTS, 4)
    make = partial(Spec, name=name, form=form)
    if form in ("register", "select"):
        inputs = ((ports[0], 1), (ports[1], 1 if form == "register" else width), (ports[2], width))
        return make(inputs=inputs, output=(ports[3], width))
    if form in ("not", "shift"):
        direction = source.choice(("left", "right")) if form == "shift" else ""
        amount = source.randint(1, 7) if form == "shift" else 0
        return make(inputs=((ports[0], width),), output=(ports[1], width), operator=direction, amount=amount)
    operators = {"bitwise": BITWISE, "arithmetic": ARITHMETIC, "compare": COMPARISONS}[form]
    output = (ports[2], 1 if form == "compare" else width)
    pair = ((ports[0], width), (ports[1], width))
    return make(inputs=pair, output=output, operator=source.choice(tuple(operators)))
