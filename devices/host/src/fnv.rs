//! FNV-1a: a hash that is the same on every host and in every version of this program, unlike the
//! standard library's hashes. It is not cryptographic.

/// The 64-bit hash of `bytes`. Different seeds give independent hashes.
pub fn hash(bytes: &[u8], seed: u64) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325 ^ seed, step)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn matches_the_reference_values() {
        assert_eq!(hash(b"", 0), 0xcbf2_9ce4_8422_2325);
        assert_eq!(hash(b"a", 0), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(hash(b"foobar", 0), 0x8594_4171_f739_67e8);
    }
}
