"""A Bible in the form of its package, with invented verses."""

from __future__ import annotations

import sqlite3

from regard.lab.data.bible import EDITIONS


def bible_database(path):
    """A Bible of 300 verses of two sentences each, of up to 64 words, in the form of the wheel's."""
    connection = sqlite3.connect(path)
    connection.execute("create table bible(id, bbName, bNumber, cNumber, vNumber, vText)")
    for n in range(300):
        place = (n // 60 + 1, n // 20 + 1, n % 20 + 1)
        english = f"Verse {n} begins{' very' * (n % 60)} well. It ends here: Amen."
        french = f"Le verset {n} débute{' fort' * (n % 60)} bien. Il finit ici: Amen."
        rows = [(n, EDITIONS[language].key, *place, text) for language, text in (("en", english), ("fr", french))]
        connection.executemany("insert into bible values (?, ?, ?, ?, ?, ?)", rows)
    connection.commit()
    connection.close()
    return path
