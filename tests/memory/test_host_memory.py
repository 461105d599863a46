from trainapp.memory.host_memory import HostMemory


def test_the_host_peak_is_of_its_window():
    host = HostMemory()
    host.window()
    block = bytearray(200 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    del block
    with_block, without = host.window()["memory/host_rss_peak"], host.window()["memory/host_rss_peak"]
    assert with_block - without > 150 * 2**20
