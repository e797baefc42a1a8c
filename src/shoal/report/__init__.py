"""What people and programs read of the twin's runs: figures side by side, a results file, tables, one page with plots.

Here belongs what is said of runs that are over, as values, text and bytes.  Figures of one run are `simulation`'s;
files are written by whoever asked for them.
"""

from shoal.report.comparison import FIGURES, Cell, Figure, Row, compare, short, told
from shoal.report.document import Document, about, as_json
from shoal.report.page import as_html
from shoal.report.tables import TABLES, parquet

__all__ = [
    "FIGURES",
    "TABLES",
    "Cell",
    "Document",
    "Figure",
    "Row",
    "about",
    "as_html",
    "as_json",
    "compare",
    "parquet",
    "short",
    "told",
]
