"""Validate: a measured file set against its simulation, calibrated: of a server, of a training."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from foretoken.app.web import compare_run, compare_steps
from foretoken.app.web.measured_file import MEASURED
from foretoken.app.web.question import find_problems
from foretoken.app.web.validations import Validation, list_validations
from foretoken.app.web.views.ask import known_names
from foretoken.app.web.visit import Redirect, Shown, Upload, Visit
from foretoken.domain.errors import ForetokenError, InvalidRequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredForm:
    """A form with a file of `what` was measured, which `compare` simulates and keeps."""

    template: str
    what: str
    example: Mapping[str, str]
    compare: Callable[[Visit, Mapping[str, str], Upload], Validation]

    def show(self, visit: Visit) -> Shown:
        """Show the form, and what was compared before."""
        return self._show(visit, visit.asked or self.example, {})

    def post(self, visit: Visit) -> Shown | Redirect:
        """Simulate, wait for that, and go to the page of the comparison."""
        try:
            upload = visit.uploads.get(MEASURED)
            if upload is None or not upload.content:
                raise InvalidRequestError.of_field(MEASURED, f"choose the file of {self.what}")
            return Redirect(f"/validate/{self.compare(visit, visit.posted, upload).name}")
        except ForetokenError as err:
            return self._show(visit, visit.posted, find_problems(err), status=400)

    def _show(
        self, visit: Visit, given: Mapping[str, str], problems: dict[str, str], status: int = 200
    ) -> Shown:
        content = {**known_names(), "given": given, "problems": problems}
        content["kept"] = list_validations(visit)
        return Shown(template=self.template, content=content, status=status)


FORMS: Final = {
    "serving": MeasuredForm(
        template="validate.html",
        what="a measured run",
        example=compare_run.EXAMPLE,
        compare=compare_run.compare_run,
    ),
    "training": MeasuredForm(
        template="validate_training.html",
        what="measured steps",
        example=compare_steps.EXAMPLE,
        compare=compare_steps.compare_steps,
    ),
}
