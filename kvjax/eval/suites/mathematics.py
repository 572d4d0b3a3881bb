r"""Final answers of mathematics: taken out of a long text, and compared with the reference.

AIME 2025 and MATH-500 (Hendrycks et al., https://arxiv.org/abs/2103.03874; the 500 of Lightman et al.,
https://arxiv.org/abs/2305.20050). The answer is what stands in the last \boxed or \fbox, its braces balanced.
Two answers are equal

1  if their normal forms are, which are those of lm-eval's ``hendrycks_math`` (0.4.13): spellings of fractions
   and roots, degrees, units behind \text, per cent, dollars, "x =", blanks;
2  or if they are equal numbers: 0.75, 3/4 and \frac{3}{4}; 1,000 and 1000; 070 and 70; 5 cm and 5;
3  or if they are lists of equal members: in order between brackets, else in any order.

The second and third are a part of what the package math_verify finds
(https://github.com/huggingface/Math-Verify), which needs sympy: no algebra is done here, so x+1 and 1+x
differ. kvpress compares strings, and cuts MATH-500's first box at its first brace: of a reference with
braces it can find none right. Decoding is greedy; its own numbers for AIME25 are of sampled texts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

_SPELLINGS = (
    ("\n", ""),
    ("\\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("\\$", ""),
)
_UNIT = "\\text{ "
"""What begins a unit, and nothing else, in MATH."""


def boxed(output: str) -> str | None:
    r"""The content of the last \boxed{...} or \fbox{...}, or of a "\boxed 5" up to a "$"; None without one.

    A box whose braces never close, since the text was cut, is none.
    """
    starts = [match.end() for match in re.finditer(r"\\(?:boxed|fbox)(?=[{ ])", output)]
    for start in reversed(starts):
        if output[start] == " ":
            return re.split(r"[$\n]", output[start + 1 :])[0]
        depth = 0
        for at in range(start, len(output)):
            depth += (output[at] == "{") - (output[at] == "}")
            if depth == 0:
                return output[start + 1 : at]
    return None


def normal(answer: str) -> str:
    """lm-eval's normal form of an answer."""
    for old, new in _SPELLINGS:
        answer = answer.replace(old, new)
    answer = answer.split(_UNIT)[0].replace("\\%", "")
    answer = answer.replace(" .", " 0.").replace("{.", "{0.")
    answer = re.sub(r"^\.", "0.", answer)
    name, equals, value = answer.partition("=")
    if equals and "=" not in value and len(name) <= 2:
        answer = value
    answer = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", answer).replace(" ", "")
    answer = re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", answer)
    answer = re.sub(r"\\frac([^{])\{", r"\\frac{\1}{", answer)
    if answer == "0.5":
        return "\\frac{1}{2}"
    return re.sub(r"^(0|-?[1-9]\d*)/(0|-?[1-9]\d*)$", r"\\frac{\1}{\2}", answer)


def number(answer: str) -> Fraction | None:
    """The rational number that an answer writes out, without its unit; None for anything else."""
    answer = answer.strip().strip("$.")
    answer = re.sub(r"\\(?:text|mbox|mathrm)\{\s*[^\d{}]*\}(?:\^\{?[23]\}?)?$", "", answer).strip()
    answer = re.sub(r"(?<=[\d}])\s*(?:\\?%|[a-z][a-z. ]+(?:\^\{?[23]\}?)?)$", "", answer)  # 5 cm^2, 50 %
    text = normal(answer).replace("{,}", ",").replace("\\,", ",")
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", text):
        text = text.replace(",", "")
    if match := re.fullmatch(r"([-+]?)(\d*)\\frac\{(-?\d+)\}\{(-?\d+)\}", text):
        sign, whole, above, below = match.groups()
        if int(below) == 0:
            return None
        value = int(whole or 0) + Fraction(int(above), int(below))
        return -value if sign == "-" else value
    return Fraction(text) if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)", text) else None


def _members(answer: str) -> tuple[str, list[str]] | None:
    """Brackets and members of a list; None for what is none, such as 1,000."""
    text = normal(answer)
    brackets = text[:1] + text[-1:]
    inner = text[1:-1] if brackets in ("()", "[]", "(]", "[)") else text
    inner, curly = re.subn(r"^\\?\{(.*)\\?\}$", r"\1", inner)  # \{1, 2\}
    brackets = brackets if inner != text and not curly else ""
    parts, depth = [""], 0
    for sign in inner.rstrip("\\"):
        depth += (sign in "{([") - (sign in "})]")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return (brackets, parts) if len(parts) > 1 and number(text) is None else None


def same(one: str, other: str) -> bool:
    """Are two answers equal?"""
    if normal(one) == normal(other) or _words(one) == _words(other) != "":
        return True
    values = number(one), number(other)
    if None not in values:
        return values[0] == values[1]
    lists = _members(one), _members(other)
    if lists[0] is None or lists[1] is None or lists[0][0] != lists[1][0]:
        return False
    left = list(lists[1][1])
    if len(left) != len(lists[0][1]):
        return False
    for member in lists[0][1]:
        among = left[:1] if lists[0][0] else left
        found = next((at for at, like in enumerate(among) if same(member, like)), None)
        if found is None:
            return False
        del left[found]
    return True


def _words(answer: str) -> str:
    r"""An answer in words, without \text around it; "" for another one."""
    word = re.sub(r"\\(?:text|mbox|textbf|mathrm)\{([^{}]*)\}", r"\1", answer).strip().strip("().")
    return word.lower() if re.fullmatch(r"[A-Za-z][A-Za-z ]*", word) else ""


def score(output: str, refs: Sequence[str]) -> float:
    """1 if the last box of an output holds one of the references, else 0."""
    answer = boxed(output)
    return float(answer is not None and any(same(answer, ref) for ref in refs))
