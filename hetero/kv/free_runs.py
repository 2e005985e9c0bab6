"""A set of numbers that knows which of them follow each other."""

from __future__ import annotations


class FreeRuns:
    """Numbers below `size`, as maximal runs. Every operation is O(1).

    index    0  1  2  3  4  5  6  7  8
    member   .  x  x  x  .  .  x  x  .
    first          .  .  1     .  6        of the last number of a run
    end         4                8         of the first number of a run; exclusive

    Runs are filed by the power of two below their length, under their last number: taking numbers from a
    run's front, as a growing sequence does, leaves it where it is filed most of the time.
    """

    def __init__(self, size: int):
        self._member = bytearray(size + 1)  # one more, so that the number behind the last is none
        self._first = [0] * size
        self._end = [0] * size
        self._files: list[dict[int, None]] = [{} for _ in range(size.bit_length() + 1)]
        self._used = 0  # bit i: file i is not empty
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: int) -> bool:
        return bool(self._member[number])

    @property
    def longest(self) -> int:
        """A length that some run has at least, and none twice; 0 when empty."""
        return (1 << self._used.bit_length()) >> 1

    def long_run(self) -> tuple[int, int]:
        """(first, end) of a run of at least `longest` numbers. Raises IndexError when empty."""
        if not self._count:
            raise IndexError("no free numbers")
        last = next(iter(self._files[self._used.bit_length() - 1]))
        return self._first[last], last + 1

    def count_from(self, number: int) -> int:
        """How many follow each other from `number` on, itself included, where none is in front of it."""
        return self._end[number] - number if self._member[number] else 0

    def put_all(self, start: int) -> None:
        """Enter all numbers from `start` on into an empty set."""
        size = len(self._first)
        self._member[start:size] = bytes([1]) * (size - start)
        self._count = size - start
        self._file(start, size)

    def put(self, number: int) -> None:
        """Enter a number. Raises ValueError when it is there."""
        if self._member[number]:
            raise ValueError(f"{number} is free already")
        first, end = number, number + 1
        if number and self._member[number - 1]:
            first = self._first[number - 1]
            self._unfile(first, number)
        if self._member[end]:
            end = self._end[end]
            self._unfile(number + 1, end)
        self._member[number] = 1
        self._count += 1
        self._file(first, end)

    def take(self, number: int, first: int) -> None:
        """Remove a number from the run that begins with `first`. Raises ValueError when it is not there."""
        if not self._member[first] or (first and self._member[first - 1]):
            raise ValueError(f"no run begins with {first}")
        end = self._end[first]
        if not first <= number < end:
            raise ValueError(f"{number} is not in the run from {first} to {end - 1}")
        self._member[number] = 0
        self._count -= 1
        length = end - first
        if number == first and length & (length - 1):  # stays in its file
            self._first[end - 1], self._end[first + 1] = first + 1, end
            return
        self._unfile(first, end)
        if first < number:
            self._file(first, number)
        if number + 1 < end:
            self._file(number + 1, end)

    def _file(self, first: int, end: int) -> None:
        self._first[end - 1], self._end[first] = first, end
        level = (end - first).bit_length() - 1
        self._files[level][end - 1] = None
        self._used |= 1 << level

    def _unfile(self, first: int, end: int) -> None:
        level = (end - first).bit_length() - 1
        del self._files[level][end - 1]
        if not self._files[level]:
            self._used &= ~(1 << level)

    def check_invariants(self) -> None:
        """Raise AssertionError unless the files hold just the maximal runs. O(size)."""
        runs, first = [], None
        for number, member in enumerate(self._member):
            if member and first is None:
                first = number
            elif not member and first is not None:
                runs.append((first, number))
                first = None
        assert self._count == sum(end - first for first, end in runs) == sum(self._member)
        for first, end in runs:
            assert self._end[first] == end and self._first[end - 1] == first
            assert end - 1 in self._files[(end - first).bit_length() - 1], f"run {first} to {end - 1}"
        assert sum(map(len, self._files)) == len(runs)
        assert self._used == sum(1 << level for level, file in enumerate(self._files) if file)
