"""The command line's group, which verbs join."""

import click

from gemsmith.version import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="gemsmith")
def cli() -> None:
    """Plan, fine-tune, export, verify, serve and compare Gemma 4 on TPU and GPU, from one recipe.

    \b
    gemsmith run recipes/demo.yaml                     every stage, into runs/demo
    gemsmith run my.yaml --set lora.rank=16            the same with one key changed
    gemsmith run runs/my                               go on with a run that was stopped
    gemsmith plan recipes/verilog_31b.yaml             what fits, how long, what it costs
    gemsmith data my.yaml --show 3                     three rows, trained tokens coloured
    gemsmith serve runs/my                             keep the tuned model up
    gemsmith report runs/a runs/b                      what differs, and the ratios that it leaves
    gemsmith runs                                      all runs: state, loss, score, speed, cost
    gemsmith chat runs/my --web                        base and tuned model side by side
    gemsmith launch my.yaml --on tpu-vm ...            the same stages on a rented machine
    """
