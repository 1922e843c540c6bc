"""The table of sections: each has its template and its place in the navigation."""

from pathlib import Path

from gemsmith.report import sections
from gemsmith.report.sections import PageSection


def test_every_section_has_its_template_and_every_template_its_section():
    folder = Path(sections.__file__).parents[1] / "templates"
    ids = [section.id for section in sections.SECTIONS]
    assert all(isinstance(section, PageSection) for section in sections.SECTIONS)
    others = {"base", "comparison", "macros", "page", "plan_page"}
    assert {*ids} == {file.stem for file in folder.glob("*.html")} - others
    for section in sections.SECTIONS:
        assert f'<section id="{section.id}"' in (folder / f"{section.id}.html").read_text()
