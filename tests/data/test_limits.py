import resource
import signal

from gemsmith.data.chat_template import find_template
from gemsmith.system.workers import ProcessLimits, limited


def test_the_limits_end_with_their_block(tokenizer_folder):
    before = [resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)]
    (tokenizer_folder / "chat_template.jinja").write_text("x")
    with limited(ProcessLimits(cpu_s=500)):
        find_template(tokenizer_folder).render([{"role": "user", "content": "hi"}])
        assert 400 < signal.getitimer(signal.ITIMER_PROF)[0] < 501
        assert 900 < signal.getitimer(signal.ITIMER_VIRTUAL)[0] < 1001
    assert [resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)] == before
    assert signal.getitimer(signal.ITIMER_PROF)[0] == signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0
