//! The parts of a file that have arrived, and those that somebody fetches.

use std::ops::Range;

/// A kill loses at most this much of each connection.
pub const PIECE: u64 = 4 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Missing,
    Taken,
    Done,
}

pub struct Pieces {
    length: u64,
    states: Vec<State>,
}

impl Pieces {
    /// All pieces of a file are missing. The caller has checked the length against the room.
    pub fn new(length: u64) -> Self {
        let count = usize::try_from(length.div_ceil(PIECE)).unwrap_or(usize::MAX);
        Self { length, states: vec![State::Missing; count] }
    }

    fn bytes(&self, pieces: Range<usize>) -> Range<u64> {
        let at = |piece: usize| (piece as u64 * PIECE).min(self.length);
        at(pieces.start)..at(pieces.end)
    }

    /// Takes the next run of missing pieces, for one of several connections: long runs at first,
    /// short ones at the end, so that all connections end together.
    pub fn take(&mut self, connections: usize) -> Option<Range<u64>> {
        let missing = self.states.iter().filter(|state| **state == State::Missing).count();
        let most = (missing / (2 * connections.max(1))).max(1);
        let start = self.states.iter().position(|state| *state == State::Missing)?;
        let run = self.states[start..].iter().take(most);
        let count = run.take_while(|state| **state == State::Missing).count();
        self.states[start..start + count].fill(State::Taken);
        Some(self.bytes(start..start + count))
    }

    /// Marks the whole pieces among these bytes.
    pub fn finish(&mut self, bytes: Range<u64>) {
        let last = bytes.end == self.length;
        let end = if last { self.length.div_ceil(PIECE) } else { bytes.end / PIECE };
        // The pieces of a run are marked again and again while it grows, so the last come first.
        for piece in (bytes.start.div_ceil(PIECE)..end).rev() {
            match self.state(piece) {
                Some(State::Done) => break,
                Some(state) => *state = State::Done,
                None => {}
            }
        }
    }

    /// Gives back the pieces of a run that have not arrived.
    pub fn give_back(&mut self, bytes: &Range<u64>) {
        let (first, end) = (bytes.start / PIECE, bytes.end.div_ceil(PIECE));
        for piece in first..end {
            if let Some(state) = self.state(piece).filter(|state| **state == State::Taken) {
                *state = State::Missing;
            }
        }
    }

    fn state(&mut self, piece: u64) -> Option<&mut State> {
        self.states.get_mut(usize::try_from(piece).ok()?)
    }

    pub fn is_whole(&self) -> bool {
        self.states.iter().all(|state| *state == State::Done)
    }

    /// The bytes of all pieces that have arrived.
    pub fn done(&self) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        for (at, _) in self.states.iter().enumerate().filter(|(_, state)| **state == State::Done) {
            match runs.last_mut() {
                Some(run) if run.end == at => run.end += 1,
                _ => runs.push(at..at + 1),
            }
        }
        runs.into_iter().map(|run| self.bytes(run)).collect()
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const LENGTH: u64 = 100 * PIECE + 5;

    #[test]
    fn runs_get_shorter_and_cover_the_file_once() {
        let mut pieces = Pieces::new(LENGTH);
        let (mut end, mut longest) = (0, u64::MAX);
        while let Some(run) = pieces.take(4) {
            assert_eq!(run.start, end);
            assert!(run.end - run.start <= longest);
            (end, longest) = (run.end, run.end - run.start);
            pieces.finish(run);
        }
        assert_eq!((end, longest), (LENGTH, 5));
        assert!(pieces.is_whole());
        assert_eq!(pieces.done(), vec![0..LENGTH]);
        assert!(Pieces::new(0).is_whole());
    }

    #[test]
    fn only_whole_pieces_count_and_the_rest_is_fetched_again() {
        let mut pieces = Pieces::new(LENGTH);
        let run = pieces.take(1).unwrap();
        assert_eq!(run, 0..50 * PIECE);
        pieces.finish(0..3 * PIECE + 7);
        assert_eq!(pieces.done(), vec![0..3 * PIECE]);
        pieces.give_back(&run);
        assert_eq!(pieces.take(1).unwrap().start, 3 * PIECE);
        pieces.finish(LENGTH - 6..LENGTH);
        assert_eq!(pieces.done().last(), Some(&(LENGTH - 5..LENGTH)));
        pieces.finish(5..PIECE - 1);
        pieces.finish(200 * PIECE..300 * PIECE);
        assert!(!pieces.is_whole());
    }
}
