//! The Internet checksum (RFC 1071).

use std::net::IpAddr;

/// Adds 16-bit words in native byte order. An odd byte at the end is padded with a zero.
pub fn sum(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<4>();
    // Adding words of 32 bits is equivalent, and faster. The sum cannot overflow 64 bits with less
    // than 16 GiB.
    let mut sum = words
        .iter()
        .fold(0_u64, |sum, word| sum.wrapping_add(u64::from(u32::from_ne_bytes(*word))));
    let (words, rest) = rest.as_chunks::<2>();
    for word in words {
        sum += u64::from(u16::from_ne_bytes(*word));
    }
    if let [last] = rest {
        sum += u64::from(u16::from_ne_bytes([*last, 0]));
    }
    sum
}

/// The checksum for a sum, as written into a header.
pub fn finish(mut sum: u64) -> [u8; 2] {
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    let folded = u16::try_from(sum).expect("folded to 16 bits");
    (!folded).to_ne_bytes()
}

/// The sum of the pseudo header of TCP, UDP and ICMPv6 (RFC 9293, 3.1; RFC 8200, 8.1).
pub fn pseudo(from: IpAddr, to: IpAddr, protocol: u8, length: usize) -> u64 {
    let mut total = u64::from(u16::from_ne_bytes([0, protocol]));
    let length = u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
    total += sum(&length);
    for address in [from, to] {
        total += match address {
            IpAddr::V4(address) => sum(&address.octets()),
            IpAddr::V6(address) => sum(&address.octets()),
        };
    }
    total
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn matches_the_example_of_the_rfc() {
        let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(finish(sum(&bytes)), (!0xddf2_u16).to_be_bytes());
        assert_eq!(finish(sum(&[])), [0xff, 0xff]);
        assert_eq!(finish(sum(&[0xab])), (!0xab00_u16).to_be_bytes());
    }

    #[test]
    fn a_message_with_its_checksum_sums_to_zero() {
        for length in 2..100 {
            let mut bytes: Vec<u8> = (0..length).map(|it: u8| it.wrapping_mul(37)).collect();
            bytes[..2].fill(0);
            let checksum = finish(sum(&bytes));
            bytes[..2].copy_from_slice(&checksum);
            assert_eq!(finish(sum(&bytes)), [0, 0], "{length} bytes");
        }
    }
}
