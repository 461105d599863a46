"""Several ranks as tests have them.

| helper | what it has |
|---|---|
| `cell` | `cell.run(2, "parallel=ddp", ...)`: a tiny run on several ranks; its settings |
| `rank` | what one rank of a cell does, and its `Record` |
| `variants` | other things it may do, such as the wrong variants of negative controls |
| `comparing` | assertions about records, tolerances |
| `pool` | the processes of cells, started once |
| `launching` | the real command line, which starts its own processes |
| `saboteur` | data for the real command line, and the faults of its workers |

Faults themselves are in tests/helpers/faults.py.
"""
