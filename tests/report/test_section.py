"""The table of sections: each has its template and its place in the navigation."""

from pathlib import Path

from gemsmith.report import sections


def test_every_section_has_its_template_and_every_template_its_section():
    folder = Path(sections.__file__).parent / "templates"
    others = {"base", "comparison", "macros", "page", "plan_page", "sweep_page"}
    assert {*sections.SECTIONS} == {file.stem for file in folder.glob("*.html")} - others
    for section in sections.SECTIONS:
        assert f'<section id="{section}"' in (folder / f"{section}.html").read_text()
