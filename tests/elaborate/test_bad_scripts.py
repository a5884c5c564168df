"""Scripts that parse and do too much, have wrong values or import what they cannot: a located diagnostic, in bounded
time and memory (tests/support/bounded.py)."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from piperlang.directives.mesh import MAX_DEVICES
from piperlang.directives.split import MAX_SPLIT
from piperlang.elaborate.interpret import MAX_CALLS
from tests.support.bounded import Text, bounded, cases, check, doubled, lines, measured, piperc, refused, save, texts

pytestmark = measured

# ------------------------------------------------------------------------------------------------------------- too long


SPLIT = f"split batch into {MAX_SPLIT} as mb\n"
LARGE = f"mesh g = a: {MAX_DEVICES}\n"


def loops(depth: int, body: str, times: int = 1000) -> str:
    return lines(*("    " * i + f"for x{i} in range({times}):" for i in range(depth)), "    " * depth + body)


MESH = "mesh gpu = pp: 2, dp: 2\n"


@cases(
    {
        "nested loops": (loops(5, "print 1"), ("P0208",)),
        "nested loops of nothing": (loops(5, "let a = 1"), ("P0208",)),
        "nested comprehensions": (
            "let a = [0 for x in range(1000) for y in range(1000) for z in range(1000)]\n",
            ("P0208",),
        ),
        "filtered comprehension": ("let a = [0 for x in range(10000) for y in range(10000) if False]\n", ("P0208",)),
        "comprehension over empty ranges": (
            "let a = [0 for x in range(1000000) for y in range(1000000) for z in range(0)]\n",
            ("P0208",),
        ),
        "empty loops": (
            "for x in range(1000000):\n    for y in range(1000000):\n        for z in range(0): print 1\n",
            ("P0208",),
        ),
        "repeat": ("repeat 10**9: print 1\n", ("P0208",)),
        "repeat of nothing": ("repeat 10**18:\n    repeat 0: print 1\n", ("P0208",)),
        "repeat false": ("repeat 10**18:\n    if False: print 1\n", ("P0208",)),
        "range": ("let a = range(10**12)\n", ("P0208",)),
        "range of two": ("let a = range(-(10**12), 10**12)\n", ("P0208",)),
        "lists added": (lambda: doubled("[1]", "{0} + {0}", 60), ("P0208",)),
        "lists multiplied": (lambda: doubled("[1]", "{0} * 10", 60), ("P0208",)),
        "strings added": (lambda: doubled('"x"', "{0} + {0}", 60), ("P0208",)),
        "strings multiplied": ('let a = "x" * 10**12\n', ("P0208",)),
        "shared lists compared": (lambda: doubled("[1]", "[{0}, {0}]", 60) + "let b = a60 == a60\n", ("P0208",)),
        "shared lists searched": (lambda: doubled("[1]", "[{0}, {0}]", 60) + "let b = 1 in a60\n", ("P0208",)),
        "shared lists printed": (lambda: doubled("[1]", "[{0}, {0}]", 60) + "print a60\n", ("P0208",)),
        "shared strings printed": (lambda: doubled('"x" * 1000000', "[{0}, {0}]", 30) + "print a30\n", ("P0208",)),
        "shared lists as an option": (
            lambda: MESH + doubled("[1]", "[{0}, {0}]", 60) + "replicate [stage=0] over gpu.dp with grads=a60\n",
            ("P0208", "P0405"),
        ),
        "shared lists as a number": (
            lambda: MESH + doubled("[1]", "[{0}, {0}]", 60) + "replicate [stage=0] over gpu.dp with prefetch=a60\n",
            ("P0208", "P0405"),
        ),
        "shared lists as a step": (
            lambda: MESH + doubled("[[comm=send]]", "[{0}, {0}]", 60) + "order on gpu: a60\n",
            ("P0208", "P0204"),
        ),
        "shared lists in a chain": (
            lambda: doubled("[[comm=send]]", "[{0}, {0}]", 60) + "order a60 -> a60\n",
            ("P0208", "P0204"),
        ),
        "steps doubled": (
            lambda: "def twice(x): x, x\n" + doubled("twice([comm=send])", "twice({0})", 60) + "print a60\n",
            ("P0208", "P0204"),
        ),
        "overlaps doubled": (
            lambda: "def both(x): x & x\n" + doubled("both([comm=send])", "both({0})", 60) + "print a60\n",
            ("P0208", "P0204"),
        ),
        "calls doubled": (
            lambda: "def f0(): 1\n" + lines(*(f"def f{i + 1}(): f{i}() + f{i}()" for i in range(30))) + "print f30()\n",
            ("P0208",),
        ),
        "power": ("let a = 2**10**9\n", ("P0211",)),
        "power of power": ("let a = (2**62)**(2**62)\n", ("P0211",)),
        "product": ("let a = " + "*".join(["1000000007"] * 100) + "\n", ("P0211",)),
        "long number": ("let a = " + "9" * 5_000 + "\n", ("P0211",)),
        "twenty digits": ("let a = 99999999999999999999\n", ("P0211",)),
        "nineteen digits": ("let a = 9999999999999999999\n", ("P0211",)),
        "sum of large": ("let a = sum([2**62, 2**62, 2**62])\n", ("P0211",)),
        "large size": ("let a = 99999999999TB\n", ("P0211",)),
        "selector conjunction doubled": (lambda: doubled("[s=1]", "({0} & {0})", 60), ("P0208",)),
        "selector unions met": (
            lambda: "let u = (" + " | ".join(f"[a={i}]" for i in range(100)) + ")\nlet v = (u & u & u & u & u & u)\n",
            ("P0208",),
        ),
        "selector unions met one by one": (
            lambda: doubled("([s=0] | [s=1])", "({0} & ([t=0] | [t=1]))", 60),
            ("P0208",),
        ),
        "selector of many values": (
            lambda: "let r = range(1000000)\nlet s = [stage={" + ", ".join(["r"] * 300) + "}]\n",
            ("P0208",),
        ),
        "many large selectors": ("let r = range(1000000)\nlet s = [[stage=r] for i in range(100000)]\n", ("P0208",)),
        "large selectors printed": ("let s = [stage=range(100000)]\nprint [s for i in range(100000)]\n", ("P0208",)),
        "large selectors compared": (
            "let s = [stage=range(100000)]\nlet t = [stage=range(100000)]\nlet b = [s == t for i in range(100000)]\n",
            ("P0208",),
        ),
        "huge mesh": ("mesh g = a: 10**18\n", ("P0408",)),
        "huge mesh of axes": ("mesh g = a: 10**9, b: 10**9\n", ("P0408",)),
        "print in a loop": ("repeat 10**9: print 1, 2, 3\n", ("P0208",)),
        "long print in a loop": ('repeat 10**9: print "x" * 1000\n', ("P0208",)),
        "meshes printed": (MESH + "repeat 10**9: print gpu\n", ("P0208",)),
        "functions called": ('def f():\n    require True, "x"\nrepeat 10**9: f()\n', ("P0208",)),
        "locals copied": (
            lambda: lines(
                "def f():",
                *(f"    let x{i} = 1" for i in range(10_000)),
                "    repeat 10**9: let y = [1 for x in [1]]",
                "f()",
            ),
            ("P0208",),
        ),
        "slices": ("let a = range(1000000)\nlet b = [a[0:1] for i in range(1000000)]\n", ("P0208",)),
        "slices of strings": ('let a = "x" * 900000\nlet b = [a[1:] for i in range(1000000)]\n', ("P0208",)),
        "strings searched": ('let a = "x" * 900000\nlet b = [("y" in a) for i in range(1000000)]\n', ("P0208",)),
        "lists sorted": ("let a = range(100000)\nlet b = [sorted(a) for i in range(1000000)]\n", ("P0208",)),
        "parts of a mesh": (LARGE + "let b = [g[a=*] for i in range(100000)]\n", ("P0208",)),
        "ranges of a mesh": (LARGE + "let b = [g[a=0:60000] for i in range(100000)]\n", ("P0208",)),
        "lengths of parts": (
            LARGE.rstrip() + ", b: 1\nlet p = g[b=0]\nlet b = [len(p) for i in range(100000)]\n",
            ("P0208", "P0404"),
        ),
    }
)
def test_script_does_too_much(tmp_path: Path, text: Text, codes: tuple[str, ...]) -> None:
    refused(check(tmp_path, text), *codes)


@pytest.mark.slow
@texts(
    {
        "split": "split batch into 10**18 as mb\n",
        "place on a large mesh": LARGE + "for i in range(10000): place [stage=i] on g\n",
        "place many": MESH + "place [stage=0:10**12] on gpu\n",
        "place a product": MESH + "let r = range(1000)\nplace [a=r, b=r, c=r, d=r] on gpu\n",
        "place a product of ranges": MESH + "place [a=0:10000, b=0:10000, c=0:10000] on gpu\n",
        "place a huge split": MESH + SPLIT + "place [stage=0, mb=0:4] on gpu[pp=0]\n",
        "place in a loop": MESH + SPLIT + "for i in range(100000): place [stage=0, mb=i] on gpu[pp=0]\n",
        "place one after the other": (
            MESH + "split batch into 20000 as mb\nfor i in range(20000): place [stage=0, mb=i] on gpu[pp=0]\n"
        ),
        "place stages": MESH + "for i in range(200000): place [stage=i] on gpu\n",
        "place twice on many": LARGE + "place [s=0] on g[a=0:60000]\nplace [s=0] on g[a=0:60000]\n",
        "order a huge split": MESH + SPLIT + "place [stage=0] on gpu\norder on gpu: [stage=0, pass=F]\n",
        "order the end of a huge split": (
            MESH + SPLIT + "place [stage=0] on gpu\norder on gpu: [stage=0, pass=F, mb!=0]\n"
        ),
        "order a product": MESH + "let r = range(1000)\norder on gpu: [a=r, b=r, c=r, d=r]\n",
        "order a million": (
            MESH + SPLIT + "place [s=0] on gpu\norder on gpu:\n    repeat 1000000: [s=0, pass=F, mb=next]\n"
        ),
        "order a million ending": (
            MESH + "split batch into 10 as mb\nplace [s=0] on gpu\norder on gpu:\n    repeat 10**9: [s=0, pass=F,"
            " mb=next?]\n"
        ),
        "order the last of many": (
            MESH
            + SPLIT
            + "place [s=0, mb=0:1000000] on gpu\norder on gpu:\n    repeat 100000: [s=0, pass=F, mb=next]\n"
        ),
        "order on a large mesh": LARGE + "for i in range(100000):\n    order on g: [comm=send]\n",
        "order on parts of a large mesh": LARGE + "for i in range(60000):\n    order on g[a=0:i+1]: [comm=send]\n",
        "order divides lanes": (
            "mesh g = a: 10000\norder on g:\n    repeat 10000: [comm=send]\nfor i in range(9999):\n    order on g[a=i]:"
            " [comm=send]\n"
        ),
        "order divides taken": (
            "mesh g = a: 10000\nsplit batch into 10000 as mb\nplace [s=0] on g\norder on g: [s=0]\n"
            "for i in range(9999):\n    order on g[a=i]: [comm=send]\n"
        ),
        "order many stages": (
            MESH + "place [stage=0:20000] on gpu\nfor i in range(20000):\n    order on gpu: [stage=i]\n"
        ),
        "order on many devices": LARGE + "for i in range(60000):\n    order on g[a=i]: [comm=send]\n",
        "many meshes": "for i in range(100000):\n    mesh g = a: i + 2\n",
        "many large meshes": "for i in range(100000):\n    mesh g = a: 60000 - i % 50000\n",
        "count": SPLIT + "tag stage=0 at m\nprint count([stage=*])\n",
        "count splits": lambda: lines(
            *(f"split batch into 1000 as s{i}" for i in range(9)), "tag stage=0 at m", "print count([stage=*])"
        ),
        "count in a loop": (
            "split batch into 100000 as mb\ntag stage=0 at m\nlet a = [count([stage=*]) for i in range(100000)]\n"
        ),
        "tags in a loop": 'for i in range(10000): tag stage=i at m\nlet a = [tags("stage") for i in range(10000)]\n',
        "paths": 'for i in range(200000): tag stage=i at m[i], n[0:i], "a.b.c"\n',
        "streams": 'for i in range(200000): stream [comm=send] on "x"\n',
        "chains": "for i in range(200000): order [comm=send] -> [comm=recv]\n",
        "requirements": 'for i in range(200000): require i >= 0, "never"\n',
        "deep call chain": lambda: (
            "def f0(): 1\n" + lines(*(f"def f{i + 1}(): f{i}()" for i in range(3_000))) + "print f3000()\n"
        ),
        "deep call chain of blocks": lambda: (
            "def f0():\n    return 1\n"
            + "".join(f"def f{i + 1}():\n    return f{i}()\n" for i in range(300))
            + "print f300()\n"
        ),
        "deep calls of deep expressions": lambda: (
            "def f0(x): x\n"
            + lines(*(f"def f{i + 1}(x): {'(1 + ' * 50}f{i}(x){')' * 50}" for i in range(20)))
            + "print f20(1)\n"
        ),
        "deep default chain": lambda: (
            "def f0(): 1\n" + lines(*(f"def f{i + 1}(x=f{i}()): x" for i in range(1_000))) + "print f1000()\n"
        ),
        "deep value printed": lambda: doubled("[1]", "[{0}]", 5_000) + "print a5000\n",
        "deep value compared": lambda: (
            doubled("[1]", "[{0}]", 5_000, "a") + doubled("[1]", "[{0}]", 5_000, "b") + "print a5000 == b5000\n"
        ),
        "deep value ordered": lambda: MESH + doubled("[[comm=send]]", "[{0}]", 5_000) + "order on gpu: a5000\n",
        "deep value forgotten": lambda: doubled("[1]", "[{0}]", 5_000),
        "deep value as an option": lambda: (
            MESH + doubled("[1]", "[{0}]", 5_000) + "replicate [s=0] over gpu.dp with grads=a5000\n"
        ),
        "deep calls of deeper expressions": lambda: (
            "def f0(x): x\n"
            + lines(*(f"def f{i + 1}(x): {'-(' * 55}f{i}(x){')' * 55}" for i in range(MAX_CALLS - 2)))
            + f"print f{MAX_CALLS - 2}(1)\n"
        ),
        "deep calls in deep blocks": lambda: (
            "def f0(x): x\n"
            + "".join(
                f"def f{i + 1}(x):\n"
                + lines(*(" " * d + "if True:" for d in range(1, 50)), " " * 50 + f"return {'[' * 50}f{i}(x){']' * 50}")
                for i in range(MAX_CALLS - 2)
            )
            + f"print f{MAX_CALLS - 2}(1)\n"
        ),
        "deep calls as arguments": lambda: "def f(x): x\nprint " + "f(" * 55 + "1" + ")" * 55 + "\n",
        "deep calls as defaults": lambda: (
            "def f0(): 1\n"
            + lines(*(f"def f{i + 1}(x=f{i}() + {'(1 + ' * 50}1{')' * 50}): x" for i in range(300)))
            + "print f300()\n"
        ),
        "deep comprehensions": lambda: "print " + "[x for x in " * 55 + "[1]" + "]" * 55 + "\n",
        "deep clauses": lambda: "print [0 " + " ".join(f"for x{i} in [0]" for i in range(300)) + "]\n",
        "deep blocks": lambda: lines(
            *(" " * i + f"for x{i} in [{'(' * 50}1{')' * 50}]:" for i in range(55)), " " * 55 + "print x0"
        ),
        "deep values in steps": lambda: (
            MESH
            + doubled("[[comm=send]]", "[{0}, {0}]", 12)
            + "order on gpu:\n"
            + lines(*("    a12 & a12" for _ in range(200)))
        ),
        "steps called": MESH + "def f(x): x, x, x\norder on gpu:\n    repeat 10**9: f([comm=send])\n",
        "steps from blocks": MESH + "def f():\n    repeat 10**6: [comm=send]\norder on gpu:\n    repeat 10**9: f()\n",
        "large steps kept": (
            "def f(x): x, x\n" + doubled("f([comm=send])", "f({0})", 13) + "let b = [f(a13) for i in range(100000)]\n"
        ),
        "large lists kept": "let b = [[x for x in range(1000)] for i in range(100000)]\n",
        "large lists repeated": "let a = [1] * 1000\nlet b = [a * 1000 for i in range(100000)]\n",
        "large strings kept": 'let b = ["x" * 100000 for i in range(100000)]\n',
        "large ranges kept": "let b = [[y for y in range(100)] + range(10000) for i in range(100000)]\n",
        "large selectors kept": "let r = range(9000)\nlet b = [[a=r, b=r, c=r] for i in range(100000)]\n",
        "large sets kept": lambda: (
            "let r = range(9000)\nlet b = [[a={" + ", ".join(["r"] * 50) + "}] for i in range(100000)]\n"
        ),
        "large selectors placed": MESH + "let r = range(9000)\nfor i in range(100000): place [a=r, b=i] on gpu\n",
        "large selectors ordered": (
            MESH + "let r = range(9000)\nplace [a=r] on gpu\norder on gpu:\n    repeat 10**6: [a=r, pass=F]\n"
        ),
        "large selectors missed": (
            MESH + "let r = range(9000)\nplace [a=1] on gpu\nfor i in range(10000):\n    order on gpu: [b=r]\n"
        ),
        "large unions": MESH + doubled("[a=1]", "({0} | [b=2] | [c=3])", 400) + "place a400 on gpu\n",
        "large unions ordered": lambda: (
            MESH
            + "place [s=0:1000] on gpu\nlet u = ("
            + " |\n".join(f"[s={i}]" for i in range(900))
            + ")\norder on gpu:\n    repeat 10**6: u\n"
        ),
        "large conjunctions": lambda: (
            MESH
            + "place ["
            + ", ".join(f"k{i}=1" for i in range(1_500))
            + "] on gpu\norder on gpu:\n    repeat 10**6: [k1=1, pass=F]\n"
        ),
        "many chunks met": (
            MESH + "place [a=0:140, b=0:140] on gpu\nfor i in range(10**5):\n    order on gpu: [a!=i, b!=i, pass=F,"
            " comm=send]\n"
        ),
        "many chunks ordered": MESH + SPLIT + "place [a=0:140, b=0:140] on gpu\norder on gpu: [a=*, pass=F]\n",
        "many chunks counted": (
            MESH + "place [a=0:140, b=0:140] on gpu\nlet c = [count([a=i, b=*]) for i in range(10**5)]\n"
        ),
        "many chunks replicated": MESH + "place [a=0:140, b=0:140] on gpu\nfor i in range(10**5): recompute [a=i]\n",
        "many splits": lambda: (
            lines(*(f"split batch into 2 as s{i}" for i in range(200)))
            + MESH
            + "place [a=1] on gpu\norder on gpu: [a=1]\n"
        ),
        "many splits ordered": lambda: (
            lines(*(f"split batch into 60000 as s{i}" for i in range(3)))
            + MESH
            + "place [a=1] on gpu\norder on gpu: [a=1, s0=0]\n"
        ),
        "many parts": (
            MESH
            + SPLIT
            + "for i in range(999): place [s=0, mb=i] on gpu[pp=0]\nfor i in range(60000): order on gpu[pp=0]: [s=0,"
            " pass=F, mb=next]\n"
        ),
        "many parts of many chunks": (
            MESH + "split batch into 900 as mb\nfor s in range(20):\n    for i in range(900): place [s=s, mb=i] on"
            " gpu[pp=0]\n"
        ),
        "next of the end": (
            MESH + SPLIT + "place [s=0] on gpu\norder on gpu:\n    repeat 10**6: [s=0, pass=F, mb=next?] \n"
        ),
        "next of a part": (
            MESH + SPLIT + "place [s=0] on gpu\norder on gpu:\n    repeat 20000: [s=0, pass=F, mb=next, mb=60000:]\n"
        ),
        "next of evens": (
            MESH
            + SPLIT
            + "place [s=0] on gpu\nlet e = [i for i in range(0, 20000, 2)]\norder on gpu:\n    repeat 9000: ([s=0,"
            " pass=F, mb=next] & [mb=e])\n"
        ),
        "lanes divided in halves": (
            LARGE + "order on g: [comm=send]\nfor i in range(1, 60000):\n    order on g[a=0:i]: [comm=send]\n"
        ),
        "lanes of every device": (
            LARGE + "for i in range(60000):\n    order on g[a=i]: [comm=send]\norder on g: [comm=recv]\norder on g:"
            " [comm=recv]\n"
        ),
        "sets of devices": LARGE + "for i in range(30000):\n    order on g[a={i, 2*i, 60000 - i}]: [comm=send]\n",
        "views": (
            "for i in range(100000):\n    mesh g = a: i % 50 + 1, b: i % 60 + 1, c: i % 7 + 1\n    replicate [s=1] over"
            " g.a\n"
        ),
        "mesh of axes": lambda: (
            "mesh g = "
            + ", ".join(f"a{i}: 1" for i in range(1_500))
            + "\nlet b = [g[a1=0, a1400=0] for i in range(10**6)]\n"
        ),
        "mesh of axes printed": lambda: (
            "mesh g = " + ", ".join(f"a{i}: 1" for i in range(1_500)) + "\nrepeat 10**6: print g\n"
        ),
        "mesh compared": lambda: (
            "mesh g = " + ", ".join(f"a{i}: 1" for i in range(1_500)) + "\nlet b = [g == g for i in range(10**6)]\n"
        ),
        "parts compared": (
            LARGE + "let p = g[a=0:60000]\nlet q = g[a=0:60000]\nlet b = [p == q for i in range(10**6)]\n"
        ),
        "parts printed": LARGE + "let p = g[a=0:60000]\nrepeat 10**6: print p\n",
        "parts kept": LARGE + "let b = [g[a=i:60000] for i in range(10**6)]\n",
        "functions compared": "def f(x): x\nlet b = [f == f for i in range(10**6)]\n",
        "long strings compared": 'let a = "x" * 900000\nlet c = "x" * 900000\nlet b = [a == c for i in range(10**6)]\n',
        "long strings searched": 'let a = "x" * 400000 + "y"\nlet c = "x" * 200000 + "z"\nprint c in a\n',
        "long strings in lists": 'let a = "x" * 900000\nlet b = [a in [a, a, a] for i in range(10**6)]\n',
        "long strings as tags": MESH + 'let a = "x" * 900000\nfor i in range(10**5): place [s=a, t=i] on gpu\n',
        "long strings as streams": 'let a = "x" * 900000\nfor i in range(10**5): stream [comm=send] on a\n',
        "zipped": "let r = range(100000)\nlet b = [zip(r, r) for i in range(10**6)]\n",
        "enumerated": "let r = range(100000)\nlet b = [enumerate(r) for i in range(10**6)]\n",
        "summed": "let r = range(100000)\nlet b = [sum(r) for i in range(10**6)]\n",
        "least": "let r = range(100000)\nlet b = [min(r) for i in range(10**6)]\n",
        "unpacked": lambda: (
            "let "
            + ", ".join(f"a{i}" for i in range(2_000))
            + " = range(2000)\nfor x, y in zip(range(1000000), range(1000000)): print x\n"
        ),
        "defaults": lambda: (
            "def f(" + ", ".join(f"a{i}={i}" for i in range(1_500)) + "): a0\nlet b = [f() for i in range(10**6)]\n"
        ),
        "long trails": lambda: (
            MESH
            + "def f0(): place [s=1] on gpu\n".replace(": place", ":\n    place")
            + "".join(f"def f{i + 1}():\n    f{i}()\n" for i in range(30))
            + "f30()\nf30()\n"
        ),
        "long word in a message": lambda: MESH + 'let s = "x" * 900000\norder [pass=s] -> [pass=F]\n',
        "long list in a message": lambda: MESH + "let s = range(900000)\nreplicate [s=0] over gpu.dp with grads=s\n",
        "long requirement": 'require False, "x" * 900000\n',
        "long key in a message": lambda: (
            MESH + "place [" + "k" * 9_000 + "=0] on gpu\norder on gpu: [" + "k" * 8_999 + "j=0]\n"
        ),
    }
)
def test_much_but_perhaps_fine(tmp_path: Path, text: Text) -> None:
    """Whatever the answer is, it comes in time."""
    outcome = bounded(check(tmp_path, text))
    assert outcome.code == 0 or refused(outcome)


@texts(
    {
        "order a million": (
            MESH + SPLIT + "place [s=0] on gpu\norder on gpu:\n    repeat 1000000: [s=0, pass=F, mb=next]\n"
        ),
        "order a hundred thousand": (
            MESH + "split batch into 100000 as mb\nplace [s=0] on gpu\norder on gpu:\n    repeat 100000: [s=0, pass=F,"
            " mb=next]\n"
        ),
        "large mesh": LARGE + "order on g[a=0]: [comm=send]\n",
        "many lanes": (
            "mesh g = a: 3000\nfor i in range(3000):\n    place [stage=i] on g[a=i]\n    order on g[a=i]: [stage=i,"
            " pass=F]\n"
        ),
        "many large meshes": "for i in range(200):\n    mesh g = a: 60000 - i\n    order on g: [comm=send]\n",
        "a long timeline": (
            MESH
            + "split batch into 60000 as mb\nplace [s=0] on gpu\nreplicate [s=0] over gpu.dp\norder on gpu:\n    repeat"
            " 30000: [s=0, pass=F, mb=next]\n"
        ),
        "a wide timeline": (
            LARGE
            + "for i in range(5000): place [stage=i] on g[a=i]\nfor i in range(5000):\n    order on g[a=i]: [stage=i,"
            " pass=F]\n"
        ),
        "a large overlap": MESH + "split batch into 20000 as mb\nplace [s=0] on gpu\norder on gpu: [s=0, pass=F]\n",
        "a large overlap that waits": (
            MESH + "split batch into 20000 as mb\nplace [stage=0:2] on gpu\norder on gpu: [stage=1, pass=F] & [stage=0,"
            " pass=F]\n"
        ),
        "several passes of a communication": MESH + "order on gpu: [comm=send, pass={F, B}]\n",
        "any pass of a communication": MESH + "order on gpu: [comm=send, pass=*]\n",
        "no pass of a communication": MESH + "order on gpu: [comm=send, !pass]\n",
        "all but a pass of a communication": MESH + "order on gpu: [comm=send, pass!=F]\n",
        "any pass": MESH + "place [s=0] on gpu\norder on gpu: [s=0, pass=*]\n",
        "no pass": MESH + "place [s=0] on gpu\norder on gpu: [s=0, !pass]\n",
        "an update with a pass": MESH + "order on gpu: [update, pass=F]\n",
    }
)
def test_orders(tmp_path: Path, text: Text) -> None:
    save(tmp_path, text)
    bounded(piperc("orders", "bad.piper", cwd=tmp_path))


@cases(
    {
        "zero": ("let a = 1 // 0\n", ("P0212",)),
        "true division": ("let a = 1 / 0\n", ("P0212",)),
        "remainder": ("let a = 1 % 0\n", ("P0212",)),
        "floats": ("let a = 1.0 / 0.0\n", ("P0212",)),
        "sizes": ("let a = 1MB // 0\n", ("P0212",)),
        "sizes by sizes": ("let a = 1MB % 0B\n", ("P0212",)),
        "negative power": ("let a = 0 ** -1\n", ("P0212",)),
        "complex": ("let a = (-8) ** 0.5\n", ("P0212",)),
        "range step": ("let a = range(0, 9, 0)\n", ("P0212",)),
        "float power": ("let a = 10.0 ** 400\n", ("P0211",)),
        "size by nothing": ("let a = 1MB * (1e999 - 1e999)\n", ("P0211", "P0212", "P0110")),
        "size by infinity": ("let a = 1MB * 1e999\n", ("P0211", "P0212", "P0110")),
        "infinity as a count": ("repeat 1e999: print 1\n", ("P0204", "P0211", "P0110")),
        "string times a huge number": ('let a = "" * 9999999999999999999\n', ("P0211",)),
        "string times a huge negative number": ('let a = "a" * -9999999999999999999\n', ("P0211",)),
        "list times a huge number": ("let a = [] * 9999999999999999999\n", ("P0211",)),
        "index": ("let a = [1][5]\n", ("P0213",)),
        "negative index": ("let a = [1][-5]\n", ("P0213",)),
        "index of nothing": ("let a = [][0]\n", ("P0213",)),
        "min of nothing": ("let a = min([])\n", ("P0205",)),
        "sort of a mixture": ('let a = sorted([1, "a"])\n', ("P0204",)),
        "sort of lists": ("let a = sorted([[1], [2]])\n", ("P0204",)),
        "recursion": ("def f(): f()\nf()\n", ("P0206",)),
        "mutual recursion": ("def f(): g()\ndef g(): f()\nf()\n", ("P0206",)),
        "recursion of three": ("def f(): g()\ndef g(): h()\ndef h(): f()\nf()\n", ("P0206",)),
        "recursion through an argument": ("def f(g): g(g)\nf(f)\n", ("P0206",)),
        "recursion through a list": ("def f(g): g[0](g)\nf([f])\n", ("P0206",)),
        "recursion through two arguments": ("def f(g, h): g(h, g)\ndef k(g, h): g(h, g)\nf(k, f)\n", ("P0206",)),
        "recursion in a comprehension": ("def f(n): [f(x) for x in range(n)]\nlet a = f(3)\n", ("P0206",)),
        "recursion in an order": (MESH + "def f(): f(), f()\norder on gpu: f()\n", ("P0206",)),
        "recursion in a default": ("def g(): f()\ndef f(a=g()): a\nlet x = f()\n", ("P0206",)),
        "an argument of itself": ("def f(x): x\nlet a = f(f)(f)(f)(1)(2)\n", ("P0204",)),
    }
)
def test_values(tmp_path: Path, text: Text, codes: tuple[str, ...]) -> None:
    refused(check(tmp_path, text), *codes)


# -------------------------------------------------------------------------------------------------------------- imports


@cases(
    {
        "unknown library": ("from std.nothing import f\n", ("P0209",)),
        "unknown name": ("from std.pipeline import nothing\n", ("P0209",)),
        "no such library": ("from numpy import array\n", ("P0209",)),
        "missing file": ('import "./nothing.piper" as n\n', ("P0209",)),
        "itself": ('import "./bad.piper" as b\n', ("P0210",)),
        "itself roundabout": ('import "./../folder/./bad.piper" as b\n', ("P0210",)),
        "directory": ('import "./directory.piper" as d\n', ("P0209",)),
        "parent": ('import ".." as d\n', ("P0209",)),
        "nothing": ('import "" as d\n', ("P0209",)),
        "dot": ('import "./.piper" as d\n', ("P0209",)),
        "binary file": ('import "./binary.piper" as b\n', ("P0101",)),
        "empty file": ('import "./empty.piper" as e\nprint e.x\n', ("P0201",)),
        "broken file": ('import "./broken.piper" as b\n', ("P0102",)),
        "absolute path": ('import "/etc/passwd" as p\n', ("P0209",)),
        "absolute script": ('import "/tmp/x.piper" as p\n', ("P0209",)),
        "another kind of file": ('import "../../../../../../../etc/passwd" as p\n', ("P0209",)),
        "python file": ('import "./x.py" as p\n', ("P0209",)),
        "device": ('import "../../../../../../dev/zero" as p\n', ("P0209",)),
        "url": ('import "http://example.com/x.piper" as p\n', ("P0209",)),
        "home": ('import "~/x.piper" as p\n', ("P0209",)),
        "fifo": ('import "./fifo.piper" as f\n', ("P0209",)),
        "link to a device": ('import "./zero.piper" as z\n', ("P0209",)),
        "broken link": ('import "./nowhere.piper" as n\n', ("P0209",)),
        "link to itself": ('import "./circle.piper" as c\n', ("P0209",)),
        "link to this file": ('import "./me.piper" as m\n', ("P0210",)),
        "nul": ('import "./a\0.piper" as n\n', ("P0209",)),
        "long name": ('import "./' + "a" * 5_000 + '.piper" as n\n', ("P0209",)),
        "long path": ('import "./' + "a/" * 5_000 + 'b.piper" as n\n', ("P0209",)),
        "through a file": ('import "./empty.piper/x.piper" as n\n', ("P0209",)),
        "line end in the name": ('import "./a\\nb.piper" as n\n', ("P0209",)),
        "file that is too long": ('import "./long.piper" as n\n', ("P0108",)),
        "file that does too much": ('import "./endless.piper" as n\n', ("P0208",)),
        "file that fails twice": ('import "./failing.piper" as a\nimport "./failing.piper" as b\n', ("P0212",)),
        "private name": ("from std.pipeline import _nothing\n", ("P0209",)),
        "in a block": ('if True:\n    import "./empty.piper" as e\n', ("P0111",)),
    }
)
def test_imports(tmp_path: Path, text: Text, codes: tuple[str, ...]) -> None:
    folder = tmp_path / "folder"
    (folder / "directory.piper").mkdir(parents=True)
    save(folder, random.Random(4).randbytes(3_000), "binary.piper")
    save(folder, "", "empty.piper")
    save(folder, "let\n", "broken.piper")
    save(folder, "let a = 1 // 0\n", "failing.piper")
    save(folder, "repeat 10**9: print 1\n", "endless.piper")
    save(folder, "x" * 30_000, "long.piper")
    os.mkfifo(folder / "fifo.piper")
    for link, target in (
        ("zero", "/dev/zero"),
        ("nowhere", "nothing"),
        ("circle", "circle.piper"),
        ("me", "bad.piper"),
    ):
        (folder / f"{link}.piper").symlink_to(target)
    refused(check(folder, text), *codes)


@pytest.mark.parametrize("length", [2, 3, 20])
def test_import_cycle(tmp_path: Path, length: int) -> None:
    for i in range(length):
        save(tmp_path, f'import "./m{(i + 1) % length}.piper" as m\n', f"m{i}.piper")
    outcome = refused(piperc("check", "m0.piper", cwd=tmp_path), "P0210")
    assert all(f"m{i}.piper" in outcome.err for i in range(length))


def test_import_cycle_from_outside(tmp_path: Path) -> None:
    save(tmp_path, 'import "./b.piper" as b\n')
    save(tmp_path, 'import "./c.piper" as c\n', "b.piper")
    save(tmp_path, 'import "./b.piper" as b\n', "c.piper")
    refused(piperc("check", "bad.piper", cwd=tmp_path), "P0210")


def test_long_import_chain(tmp_path: Path) -> None:
    length = 400
    for i in range(length):
        save(tmp_path, f'import "./m{i + 1}.piper" as m\n' if i + 1 < length else "let a = 1\n", f"m{i}.piper")
    outcome = bounded(piperc("check", "m0.piper", cwd=tmp_path))
    assert outcome.code == 0 or refused(outcome)


def test_same_function_text_in_two_files(tmp_path: Path) -> None:
    """Two functions of one text are still two functions."""
    save(tmp_path, 'from "./b.piper" import f as g\ndef f(): g()\nprint f()\n')
    save(tmp_path, "def g(): 1\ndef f(): g()\n", "b.piper")
    assert bounded(piperc("check", "bad.piper", cwd=tmp_path)).code == 0


def test_imports_of_imports(tmp_path: Path) -> None:
    """Every file imports the next one twice: loaded once each."""
    for i in range(30):
        save(tmp_path, f'import "./m{i + 1}.piper" as a\nimport "./m{i + 1}.piper" as b\n', f"m{i}.piper")
    save(tmp_path, "let a = 1 // 0\n", "m30.piper")
    refused(piperc("check", "m0.piper", cwd=tmp_path), "P0212")
