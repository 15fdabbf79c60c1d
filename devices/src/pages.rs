//! A set of pages of a memory, with one bit for each page.

pub use host::display::PAGE_BYTES;

/// A set of pages: bit `n % 64` of word `n / 64` is page `n`.
#[derive(Clone, Debug, Default)]
pub struct Pages(Vec<u64>);

impl Pages {
    /// An empty set for a memory of `bytes` bytes.
    pub fn empty(bytes: u64) -> Self {
        let words = usize::try_from(bytes.div_ceil(PAGE_BYTES).div_ceil(64)).unwrap_or(0);
        Self(vec![0; words])
    }

    /// Adds the pages that contain these bytes. Pages beyond the end are ignored.
    pub fn mark(&mut self, offset: u64, length: usize) {
        let Some(last) = (length as u64).checked_sub(1) else { return };
        for page in offset / PAGE_BYTES..=offset.saturating_add(last) / PAGE_BYTES {
            let word = usize::try_from(page / 64).ok().and_then(|word| self.0.get_mut(word));
            let Some(word) = word else { return };
            *word |= 1 << (page % 64);
        }
    }

    /// Adds the pages of another set. Pages beyond the end are ignored.
    pub fn add(&mut self, more: &[u64]) {
        self.0.iter_mut().zip(more).for_each(|(word, more)| *word |= more);
    }

    /// Moves all pages to `list`, and extends it as needed.
    pub fn move_to(&mut self, list: &mut Vec<u64>) {
        list.resize(list.len().max(self.0.len()), 0);
        list.iter_mut().zip(&mut self.0).for_each(|(to, from)| *to |= std::mem::take(from));
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn pages_are_marked_and_taken_once() {
        let mut pages = Pages::empty(66 * PAGE_BYTES);
        pages.mark(PAGE_BYTES - 1, 2);
        pages.mark(65 * PAGE_BYTES, 1);
        pages.mark(128 * PAGE_BYTES, 1);
        pages.mark(5 * PAGE_BYTES, 0);
        pages.mark(u64::MAX, usize::MAX);
        pages.add(&[1 << 9, 0, 7]);
        let mut list = vec![1 << 63];
        pages.move_to(&mut list);
        assert_eq!(list, [1 << 63 | 1 << 9 | 0b11, 0b10]);
        pages.move_to(&mut list);
        assert_eq!(list, [1 << 63 | 1 << 9 | 0b11, 0b10], "reported once");
    }
}
