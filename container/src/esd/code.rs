//! Huffman codes of at most 15 bits, as LZMS and XPRESS have them.

/// Maximum bits of a code.
pub(super) const MAX_BITS: u32 = 15;
/// Lengths of codes, with 0.
pub(super) const LENGTHS: usize = MAX_BITS as usize + 1;

/// Builds the tree of a code.
#[derive(Default)]
pub(super) struct Tree {
    /// Counts and symbols, the rarest first.
    leaves: Vec<(u32, u16)>,
    /// Inner nodes: their counts, and then their depths.
    nodes: Vec<u32>,
    parents: Vec<usize>,
    by_symbol: Vec<u8>,
}

impl Tree {
    /// Makes the code for symbols that were counted. Returns the number of codes of each length.
    /// Symbols that did not occur have none.
    pub(super) fn make(&mut self, counts: &[u32]) -> [usize; LENGTHS] {
        self.leaves.clear();
        let counted = counts.iter().copied().zip(0_u16..);
        self.leaves.extend(counted.filter(|(count, _)| *count > 0));
        self.leaves.sort_unstable();
        let lengths = self.lengths();
        self.by_symbol.clear();
        self.by_symbol.resize(counts.len(), 0);
        // The rarest symbols have the longest codes.
        let mut leaves = self.leaves.iter();
        for (length, count) in (0_u8..16).zip(lengths).skip(1).rev() {
            for (_, symbol) in leaves.by_ref().take(count) {
                self.by_symbol[usize::from(*symbol)] = length;
            }
        }
        lengths
    }

    /// The length of the code of each symbol.
    pub(super) fn by_symbol(&self) -> &[u8] {
        &self.by_symbol
    }

    fn lengths(&mut self) -> [usize; LENGTHS] {
        let mut lengths = [0; LENGTHS];
        if self.leaves.len() < 2 {
            lengths[1] = self.leaves.len();
            return lengths;
        }
        self.join();
        let root = self.nodes.len() - 1;
        self.nodes[root] = 0;
        lengths[1] = 2;
        for node in (0..root).rev() {
            let depth = self.nodes[self.parents[node]] + 1;
            self.nodes[node] = depth;
            // A node that is too deep takes the place of the deepest leaf that can have children.
            let mut length = depth.min(MAX_BITS) as usize;
            if depth >= MAX_BITS {
                length = (1..length).rev().find(|it| lengths[*it] > 0).unwrap_or(1);
            }
            lengths[length] -= 1;
            lengths[length + 1] += 2;
        }
        lengths
    }

    /// Joins the two rarest nodes until one is left. Leaves come before equal nodes.
    fn join(&mut self) {
        self.nodes.clear();
        self.parents.clear();
        let (mut leaf, mut inner) = (0, 0);
        for parent in 0..self.leaves.len() - 1 {
            let mut sum = 0;
            for _ in 0..2 {
                let rest = self.leaves.get(leaf).map(|(count, _)| *count);
                match (rest, self.nodes.get(inner)) {
                    (Some(count), Some(other)) if count > *other => {
                        sum += other;
                        self.parents[inner] = parent;
                        inner += 1;
                    }
                    (Some(count), _) => {
                        sum += count;
                        leaf += 1;
                    }
                    (None, Some(other)) => {
                        sum += other;
                        self.parents[inner] = parent;
                        inner += 1;
                    }
                    (None, None) => {}
                }
            }
            self.nodes.push(sum);
            self.parents.push(parent);
        }
    }
}
