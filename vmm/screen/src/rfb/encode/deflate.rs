//! A compressed stream that lasts as long as a client's connection (RFC 1950).
//!
//! The effort may change at any time, which zlib itself does not allow. After a flush, another
//! compressor writes deflate blocks into the same stream. These blocks do not refer to data before
//! the flush.

use zlib_rs::{Deflate, DeflateConfig, DeflateFlush, Status, Strategy};

/// Data is collected until there is at least this much to compress.
const PORTION: usize = 64 << 10;

/// Deflate with a window of 32 KiB. Decoders ignore the level.
const HEADER: [u8; 2] = [0x78, 0x01];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effort {
    /// Search for repetitions, with this level of zlib.
    Search(i32),
    /// Only use short codes for frequent bytes. Photographs have no repetitions, and a search takes
    /// ten times as long.
    Huffman,
}

impl Effort {
    /// The effort for a client's level. Levels beyond 6 of zlib take far longer than their savings
    /// justify.
    pub(super) fn new(compression: u8) -> Self {
        Self::Search(i32::from(compression.min(6)))
    }

    /// The effort for data that resembles a photograph. At the highest levels it is searched all
    /// the same.
    pub(super) fn photograph(self) -> Self {
        match self {
            Self::Search(1..=5) => Self::Huffman,
            it => it,
        }
    }

    fn compressor(self) -> Deflate {
        let (level, strategy) = match self {
            Self::Search(level) => (level, Strategy::Default),
            Self::Huffman => (1, Strategy::HuffmanOnly),
        };
        // Negative: raw deflate, because we write the header.
        let window_bits = -15;
        Deflate::new_with_config(DeflateConfig {
            level,
            strategy,
            window_bits,
            ..Default::default()
        })
    }
}

/// A compressed stream. It allocates nothing until it is used.
#[derive(Default)]
pub(super) struct Stream {
    /// One compressor for each kind of effort.
    compressors: [Option<(Effort, Deflate)>; 2],
    /// The effort of the last write.
    effort: Option<Effort>,
}

impl Stream {
    /// Compresses `plain` and clears it, if there is enough data.
    pub(super) fn feed(&mut self, effort: Effort, plain: &mut Vec<u8>, out: &mut Vec<u8>) {
        if plain.len() >= PORTION {
            self.write(effort, plain, DeflateFlush::NoFlush, out);
            plain.clear();
        }
    }

    /// Compresses `plain` and clears it, so that the client can decode everything that was written.
    pub(super) fn finish(&mut self, effort: Effort, plain: &mut Vec<u8>, out: &mut Vec<u8>) {
        self.write(effort, plain, DeflateFlush::SyncFlush, out);
        plain.clear();
    }

    fn write(&mut self, effort: Effort, plain: &[u8], flush: DeflateFlush, out: &mut Vec<u8>) {
        if self.effort.is_none() {
            out.extend(HEADER);
        }
        if self.effort != Some(effort) {
            self.switch(effort, out);
        }
        if let Some((_, deflate)) = &mut self.compressors[usize::from(effort == Effort::Huffman)] {
            compress(deflate, plain, flush, out);
        }
    }

    /// Switches to the compressor for this effort. It is reset, because its history is not what the
    /// decoder has seen last.
    fn switch(&mut self, effort: Effort, out: &mut Vec<u8>) {
        let slot = |effort| usize::from(effort == Effort::Huffman);
        if let Some(before) = self.effort.replace(effort)
            && let Some((_, deflate)) = &mut self.compressors[slot(before)]
        {
            compress(deflate, &[], DeflateFlush::SyncFlush, out);
        }
        match &mut self.compressors[slot(effort)] {
            Some((its, deflate)) if *its == effort => deflate.reset(),
            other => *other = Some((effort, effort.compressor())),
        }
    }
}

fn compress(deflate: &mut Deflate, mut plain: &[u8], flush: DeflateFlush, out: &mut Vec<u8>) {
    loop {
        let start = out.len();
        out.resize(start + plain.len() + 128, 0);
        let (taken, given) = (deflate.total_in(), deflate.total_out());
        let status = deflate.compress(plain, &mut out[start..], flush);
        let length = |now: u64, before: u64| usize::try_from(now - before).unwrap_or(usize::MAX);
        let given = length(deflate.total_out(), given);
        let full = start + given == out.len();
        plain = &plain[length(deflate.total_in(), taken)..];
        out.truncate(start + given);
        match status {
            Ok(Status::Ok) if full || !plain.is_empty() => {}
            // There was nothing left to do.
            Ok(_) => return,
            Err(error) => unreachable!("deflate takes all bytes: {}", error.as_str()),
        }
    }
}

#[cfg(test)]
mod test {
    use flate2::{Decompress, FlushDecompress};

    use super::*;

    #[test]
    fn a_stream_continues_when_its_effort_changes() {
        let mut noise = 1_u32;
        let mut text: Vec<u8> = b"the quick brown fox ".repeat(20_000);
        text.extend((0..100_000).map(|_| {
            noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            noise.to_le_bytes()[3]
        }));
        let (mut stream, mut decoder) = (Stream::default(), Decompress::new(true));
        let efforts = [Effort::Huffman, Effort::Search(1), Effort::Huffman, Effort::Search(1)];
        let levels = [0, 9, 3, 1, 0, 6].map(Effort::Search);
        for (round, effort) in efforts.into_iter().chain(levels).enumerate() {
            let (mut plain, mut out) = (Vec::new(), Vec::new());
            for (index, part) in text.chunks(10_000).enumerate() {
                plain.extend(part);
                let other = if index % 17 == 5 { Effort::Huffman } else { effort };
                if other == effort {
                    stream.feed(effort, &mut plain, &mut out);
                } else {
                    stream.finish(other, &mut plain, &mut out);
                }
            }
            stream.finish(effort, &mut plain, &mut out);
            assert!(plain.is_empty());
            let mut back = Vec::with_capacity(text.len() + 1);
            decoder.decompress_vec(&out, &mut back, FlushDecompress::Sync).unwrap();
            assert!(back == text, "round {round}, {effort:?}");
            if let Effort::Search(1..) = effort {
                assert!(out.len() < text.len() / 2, "{effort:?}: {}", out.len());
            }
        }
    }
}
