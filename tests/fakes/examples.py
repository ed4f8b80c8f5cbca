"""How many examples a property test tries: few in the daily loop, many where there is time.

``pytest --hypothesis-profile=thorough``, as ``make test-all`` runs it, tries many. Either way the examples
are derived from the test, so that a failure repeats; it prints the example, and what reproduces it.
"""

from hypothesis import settings

DAILY, THOROUGH = "daily", "thorough"
_DAILY_EXAMPLES, _THOROUGH_EXAMPLES = 15, 100


def register_profiles() -> None:
    """Make both known to hypothesis, and load the daily one, which an option may replace."""
    # No clock that decides whether a test passes, and no memory of earlier runs.
    always = settings(deadline=None, derandomize=True, database=None, print_blob=True)
    settings.register_profile(DAILY, always, max_examples=_DAILY_EXAMPLES)
    settings.register_profile(THOROUGH, always, max_examples=_THOROUGH_EXAMPLES)
    settings.load_profile(DAILY)


def examples(daily: int, thorough: int) -> settings:
    """Return the settings of a test that needs more or fewer examples than the profile has."""
    is_thorough = settings.get_current_profile_name() == THOROUGH
    return settings(max_examples=thorough if is_thorough else daily)
