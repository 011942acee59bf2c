"""One comparison with a measured run that is kept: its page, its file, and a calibration of it."""

from foretoken.app.web.measured_file import CALIBRATE, CORRECTION
from foretoken.app.web.validations import find_validation, forget_validation, read_validation
from foretoken.app.web.views.results import send_page
from foretoken.app.web.views.validate import FORMS
from foretoken.app.web.visit import Redirect, Sent, Shown, Visit


def show(visit: Visit) -> Shown:
    """Show what was compared, and what to do next."""
    found = find_validation(visit, visit.place["name"])
    return Shown(template="validated.html", content={"found": found})


def send_report(visit: Visit) -> Sent:
    """Send the page of the comparison, which is whole in one file."""
    return send_page(read_validation(visit, find_validation(visit, visit.place["name"])).page)


def send_measured(visit: Visit) -> Sent:
    """Send the file that was measured, as it was given."""
    files = read_validation(visit, find_validation(visit, visit.place["name"]))
    return Sent(
        body=files.measured.content,
        media="application/octet-stream",
        file_name=f"{visit.place['name']}-measured",
    )


def forget(visit: Visit) -> Redirect:
    """Forget a comparison and the file it is of; go to what is left."""
    forget_validation(visit, visit.place["name"])
    return Redirect("/validate")


def calibrate(visit: Visit) -> Redirect:
    """Compare the same file again and learn from it; go to the page of that."""
    found = find_validation(visit, visit.place["name"])
    files = read_validation(visit, found)
    given = {**files.form, CALIBRATE: "on", CORRECTION: visit.posted.get(CORRECTION, "")}
    compared = FORMS[found.kind].compare(visit, given, files.measured)
    return Redirect(f"/validate/{compared.name}")
