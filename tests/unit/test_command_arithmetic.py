"""Computing with plain numbers is understood where the result is only shown."""

from __future__ import annotations

import pytest

from hermes_agent.tools.approval.reading import read_command


@pytest.mark.parametrize(
    "command",
    ["echo marker-$((20+22))", "echo $((1 + 2)) $((3*4))", "echo $(( 7 % 2 ))x", "echo a | wc -l && echo $((-1))"],
)
def test_what_echo_computes_from_numbers_only_reads(command):
    assert read_command(command).read_only, read_command(command).why


@pytest.mark.parametrize(
    "command",
    [
        "echo $((x=1))",
        "echo $((a[$(touch f)]))",
        "echo $((x++))",
        "echo $(($(touch f)))",
        "echo $((`touch f`))",
        "echo $((1)",
        "echo $((touch f); touch g)",
        "echo $((1 > 2))",
        "echo $((1\n))",
        "echo $(( (1) ))",
        'echo "$((1))"',
        "echo $((1)) > f$((1))",
        "cat /proc/$((1))/environ",
        "cat < file$((1))",
        "head $((0-5)) f",
        "$((1)) x",
        "ech$((1)) x",
    ],
)
def test_every_other_computation_is_asked_about(command):
    assert not read_command(command).read_only


def test_single_quotes_keep_it_a_text():
    reading = read_command("echo '$((1))' 2>&1")
    assert reading.read_only
    assert "$((1))" in reading.words
