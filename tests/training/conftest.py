import pytest
import runs


@pytest.fixture
def prepare(tmp_path):
    """`runs.prepare` in directories of the test; closed at its end."""
    sessions = []

    def make(*overrides):
        sessions.append(runs.prepare(tmp_path / str(len(sessions)), *overrides))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()
