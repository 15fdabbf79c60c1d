//! Algorithms that NTLM still needs: MD4 (RFC 1320), HMAC-MD5 (RFC 2104) and RC4.
//!
//! They protect nothing by themselves. NTLM derives from them the keys of SMB's signatures.

/// MD4 of a password in UTF-16, which is short.
pub fn md4(message: &[u8]) -> [u8; 16] {
    let mut padded = message.to_vec();
    padded.push(0x80);
    while padded.len() % 64 != 56 {
        padded.push(0);
    }
    let bits = u64::try_from(message.len()).expect("64-bit host") * 8;
    padded.extend(bits.to_le_bytes());
    let mut state = [0x6745_2301_u32, 0xefcd_ab89, 0x98ba_dcfe, 0x1032_5476];
    for block in padded.as_chunks::<64>().0 {
        let before = state;
        let words = block.as_chunks::<4>().0;
        for step in 0..48 {
            mix(&mut state, words, step);
        }
        for (value, old) in state.iter_mut().zip(before) {
            *value = value.wrapping_add(old);
        }
    }
    let mut digest = [0; 16];
    for (bytes, value) in digest.as_chunks_mut::<4>().0.iter_mut().zip(state) {
        *bytes = value.to_le_bytes();
    }
    digest
}

/// One of the 48 steps of a block. The words rotate, so that the first is always the changed one.
fn mix(state: &mut [u32; 4], words: &[[u8; 4]], step: usize) {
    const ORDER: [usize; 16] = [0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15];
    const SHIFTS: [[u32; 4]; 3] = [[3, 7, 11, 19], [3, 5, 9, 13], [3, 9, 11, 15]];
    let [a, b, c, d] = *state;
    let (round, place) = (step / 16, step % 16);
    let (mixed, word) = match round {
        0 => ((b & c) | (!b & d), place),
        1 => (((b & c) | (b & d) | (c & d)).wrapping_add(0x5a82_7999), place % 4 * 4 + place / 4),
        _ => ((b ^ c ^ d).wrapping_add(0x6ed9_eba1), ORDER[place]),
    };
    let sum = a.wrapping_add(mixed).wrapping_add(u32::from_le_bytes(words[word]));
    *state = [d, sum.rotate_left(SHIFTS[round][place % 4]), b, c];
}

pub fn hmac_md5(key: &[u8; 16], parts: &[&[u8]]) -> [u8; 16] {
    let mut pad = [0; 64];
    pad[..16].copy_from_slice(key);
    let mut inner = md5::Context::new();
    inner.consume(pad.map(|it| it ^ 0x36));
    for part in parts {
        inner.consume(part);
    }
    let mut outer = md5::Context::new();
    outer.consume(pad.map(|it| it ^ 0x5c));
    outer.consume(inner.finalize().0);
    outer.finalize().0
}

pub fn md5(parts: &[&[u8]]) -> [u8; 16] {
    let mut context = md5::Context::new();
    for part in parts {
        context.consume(part);
    }
    context.finalize().0
}

/// Encrypts or decrypts with RC4.
pub fn rc4(key: &[u8], data: &mut [u8]) {
    let mut state: [u8; 256] = std::array::from_fn(|it| it.to_le_bytes()[0]);
    let mut j = 0_u8;
    for i in 0..256 {
        j = j.wrapping_add(state[i]).wrapping_add(key[i % key.len()]);
        state.swap(i, j.into());
    }
    let (mut i, mut j) = (0_u8, 0_u8);
    for byte in data {
        i = i.wrapping_add(1);
        j = j.wrapping_add(state[usize::from(i)]);
        state.swap(i.into(), j.into());
        let at = state[usize::from(i)].wrapping_add(state[usize::from(j)]);
        *byte ^= state[usize::from(at)];
    }
}

#[cfg(test)]
pub mod test {
    use super::*;

    pub(crate) fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<_> = text.bytes().filter(|it| !it.is_ascii_whitespace()).collect();
        let pair = |it: &[u8]| u8::from_str_radix(str::from_utf8(it).unwrap(), 16).unwrap();
        digits.chunks(2).map(pair).collect()
    }

    #[test]
    fn md4_has_the_values_of_rfc_1320() {
        let long =
            "12345678901234567890123456789012345678901234567890123456789012345678901234567890";
        for (text, digest) in [
            ("", "31d6cfe0d16ae931b73c59d7e0c089c0"),
            ("abc", "a448017aaf21d8525fc10ae87aa6729d"),
            ("abcdefghijklmnopqrstuvwxyz", "d79e1c308aa5bbcdeea8ed63df412da9"),
            (long, "e33b4ddc9c38f2199c3e7b164fcc0536"),
        ] {
            assert_eq!(md4(text.as_bytes()).to_vec(), hex(digest), "{text}");
        }
    }

    #[test]
    fn hmac_md5_has_the_value_of_rfc_2202() {
        let digest = hmac_md5(&[0x0b; 16], &[b"Hi ", b"There"]);
        assert_eq!(digest.to_vec(), hex("9294727a3638bb1c13f48ef8158bfc9d"));
    }

    #[test]
    fn rc4_has_the_value_of_rfc_6229() {
        let mut zeros = [0; 16];
        rc4(&hex("0102030405"), &mut zeros);
        assert_eq!(zeros.to_vec(), hex("b2396305f03dc027ccc3524a0a1118a8"));
    }
}
