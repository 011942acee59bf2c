"""The name of a profile: by it an interrupted one finds the rows it has already."""

import hashlib
import json
import uuid
from dataclasses import replace

from foretoken.domain import schema
from foretoken.domain.measurements.profiling import ProfileRequest
from foretoken.domain.name import check_name

_NUM_DIGITS = 12


def name_profile(request: ProfileRequest) -> str:
    """Return the request's name, or one made of what it requests: the same for the same.

    A request that skips nothing and has no name is a new profile each time.

    Raises:
        InvalidRequestError: its name is none.

    """
    if request.name:
        return check_name(request.name, "name")
    if not request.skip_covered:
        return uuid.uuid4().hex[:_NUM_DIGITS]
    # How long it may take does not make it another profile.
    content = json.dumps(schema.encode(replace(request, time_cap_s=0.0)), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:_NUM_DIGITS]
