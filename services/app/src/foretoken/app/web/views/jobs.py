"""Jobs of all services, live, with cancel; a finished one leads to its result."""

from typing import Any, Final

from foretoken.app.web.views.results import ANSWERS
from foretoken.app.web.visit import Redirect, Sent, Shown, Visit, send_json
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, UnknownJobError
from foretoken.domain.job import Job, JobState

_SERVICES: Final = ("simulator", "predictor", "catalog", "profiler")
_SHOWN: Final = 200
# Kinds of jobs whose results have pages.
_WITH_PAGE: Final = ("serving", "training", "capacity")
_CHECK: Final = "check"


def show(visit: Visit) -> Shown:
    """Show the jobs."""
    return Shown(template="jobs.html", content={"jobs": _list(visit)})


def send_list(visit: Visit) -> Sent:
    """Send what the page shows anew now and then."""
    return send_json(_list(visit))


def show_one(visit: Visit) -> Shown | Redirect:
    """Show a job while it runs, and go to its result after."""
    service, job_id = visit.place["service"], visit.place["job"]
    job = _port(visit, service).get_job(job_id)
    if job.state is JobState.SUCCEEDED and (target := result_of(service, job)):
        return Redirect(target)
    content = {
        "job": job,
        "service": service,
        "title": f"{job.title or job.kind} {job.state.name.lower()}",
        "can_resume": _can_resume(service, job),
    }
    return Shown(template="job.html", content=content)


def cancel(visit: Visit) -> Redirect:
    """Ask a job to stop."""
    service, job_id = visit.place["service"], visit.place["job"]
    _port(visit, service).cancel_job(job_id)
    return Redirect(f"/jobs/{service}/{job_id}")


def resume(visit: Visit) -> Redirect:
    """Start what was cancelled or failed once more; go to its job."""
    job = visit.simulator.resume_job(visit.place["job"])
    return Redirect(f"/jobs/simulator/{job.job_id}")


def result_of(service: str, job: Job) -> str:
    """Return where the result of a job is shown; empty where it has no page."""
    if service == "catalog" and job.kind == _CHECK:
        return f"/catalog/quality/{job.job_id}"
    if service != "simulator":
        return ""
    place = ANSWERS.get(job.kind) or ("/results" if job.kind in _WITH_PAGE else "")
    return place and f"{place}/{job.job_id}"


def _list(visit: Visit) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {
            **schema.encode(one),
            "service": "import",
            "address": f"/catalog/imports/{one.job_id}",
            "error_message": "",
            "is_final": one.is_final,
            "can_resume": one.can_resume,
            "can_cancel": not one.is_final,
        }
        for one in visit.imports.list()
    ]
    for service in _SERVICES:
        # The others are not opened to look whether they have jobs: they would load packages.
        if service in visit.offered.names and visit.offered.is_open(service):
            jobs = _port(visit, service).list_jobs()
            found += [_describe(service, job) for job in jobs[:_SHOWN]]
    return sorted(found, key=lambda job: str(job["created_at"]), reverse=True)[:_SHOWN]


def _describe(service: str, job: Job) -> dict[str, Any]:
    return {
        **schema.encode(job),
        "service": service,
        "address": f"/jobs/{service}/{job.job_id}",
        "is_final": job.state.is_final,
        "can_resume": _can_resume(service, job),
        "can_cancel": not job.state.is_final,
    }


def _can_resume(service: str, job: Job) -> bool:
    return service == "simulator" and job.state in (JobState.CANCELLED, JobState.FAILED)


def _port(visit: Visit, service: str) -> Any:
    if service not in _SERVICES:
        raise UnknownJobError(f"there is no service {service}", name=service)
    if service not in visit.offered.names:
        raise InvalidRequestError.of_field("service", f"{service} is not served here")
    return visit.guard(service)
