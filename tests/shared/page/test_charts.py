"""Charts: every point is inside the picture, for any values."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.shared.page.html_page import HEIGHT, WIDTH, Line, chart

FLOATS = st.floats(-1e30, 1e30, allow_nan=False)


@given(values=st.lists(FLOATS, min_size=1, max_size=8), log=st.booleans(), first=st.integers(0, 99))
def test_points_are_inside(values: list[float], log: bool, first: int) -> None:
    """The SVG is well-formed, and its lines, dots and texts are inside the picture."""
    points = tuple((first + n, abs(value) if log else value) for n, value in enumerate(values))
    if log and not any(value for _, value in points):
        points = (*points, (first + len(values), 1.0))
    lines = [Line(label="<a>", points=points, colour=0), Line(label="b", points=(), colour=7)]
    figure = ElementTree.fromstring(chart("T&", "loss", lines, log=log))
    svg = figure.find("svg")
    assert svg is not None
    drawn = [one.get("points", "").split() for one in svg.iter("polyline")]
    drawn += [[f"{one.get('cx')},{one.get('cy')}"] for one in svg.iter("circle")]
    assert sum(map(len, drawn)) == len(points)
    for at in (at for places in drawn for at in places):
        x, y = map(float, at.split(","))
        assert 0 <= x <= WIDTH
        assert 0 <= y <= HEIGHT
    assert 3 <= len(list(svg.iter("text"))) <= 20
    assert [item.text or item[0].tail for item in figure.iter("li")] == ["<a>", "b"]


def test_zero_has_its_place() -> None:
    """On a logarithmic axis 0 is drawn below all other values, with a tick of its own."""
    figure = chart("T", "d", [Line(label="a", points=((0, 0.0), (1, 1e-6)), colour=0)], log=True)
    svg = ElementTree.fromstring(figure).find("svg")
    assert svg is not None
    (line,) = svg.iter("polyline")
    zero, other = (float(at.split(",")[1]) for at in line.get("points", "").split())
    assert zero > other
    assert "0" in [text.text for text in svg.iter("text") if text.get("class") == "end"]
