//! Messages of a guest that are nearly valid.

use host::testutil::noise::Noise;

fn byte(noise: &mut Noise) -> u8 {
    noise.next().unwrap_or(0)
}

fn place(noise: &mut Noise, length: usize) -> usize {
    usize::try_from(noise.below(length.max(1) as u64)).expect("it is below a length")
}

/// Small numbers, large ones, and any.
fn odd(noise: &mut Noise) -> u8 {
    match noise.below(4) {
        0 => byte(noise) % 8,
        1 => 255 - byte(noise) % 8,
        2 => byte(noise) & 0xc0,
        _ => byte(noise),
    }
}

pub(crate) fn dhcp(noise: &mut Noise) -> Vec<u8> {
    let mut message = vec![0; 236];
    for _ in 0..noise.below(8) {
        let at = place(noise, message.len());
        message[at] = odd(noise);
    }
    message.extend([99, 130, 83, 99]);
    message.extend([53, 1, noise.choose(&[1, 3, 4, 7, 8])]);
    for _ in 0..noise.below(6) {
        // Options that the server reads, and any other.
        let code = noise.choose(&[0, 50, 52, 53, 54, 57, 61, 255]);
        let code = if noise.below(4) == 0 { odd(noise) } else { code };
        let length = if noise.below(8) == 0 { odd(noise) } else { byte(noise) % 8 };
        message.extend([code, length]);
        message.extend((0..length % 16).map(|_| odd(noise)));
    }
    message
}

/// A DNS query after its length, and a resolver's answer.
pub(crate) fn dns(noise: &mut Noise) -> Vec<u8> {
    let names: [&[u8]; 7] = [
        b"\x04host\x03lan\0",
        b"\x07Windows\0",
        b"\x03web\x05other\0",
        b"\x03web\x03lan\0",
        b"\x011\x010\x0230\x03172\x07in-addr\x04arpa\0",
        b"\0",
        b"\x01.\x02\xff\0\0",
    ];
    let records: [&[u8]; 4] = [
        b"\xc0\x0c\0\x01\0\x01\0\0\0\x3c\0\x04\x7f\0\0\x01",
        b"\xc0\x0c\0\x05\0\x01\0\0\0\x3c\0\x02\xc0\x0c",
        b"\xc0\x0c\0\x05\0\x01\0\0\0\x3c\0\x06\x03www\xc0\x10",
        b"\0\0\x29\x04\xd0\0\0\0\0\0\0",
    ];
    let mut message = vec![1, 2, 1, 0, 0, 1, 0, 0, 0, 0, 0, byte(noise) % 2];
    message.extend(noise.choose(&names));
    message.extend([0, noise.choose(&[1, 12, 28, 255]), 0, 1]);
    // Sometimes an OPT record, or its beginning.
    let opt = [0, 0, 41, 4, 208, 0, 0, 0, 0, 0, byte(noise) % 3];
    message.extend(&opt[..place(noise, opt.len() + 1)]);
    let cut = u8::try_from(message.len()).expect("it is short");
    let mut data = [&[cut][..], &message].concat();
    data.extend([0, 1, 0, 0, 0, 0].map(|it| it | byte(noise) & 3));
    for _ in 0..noise.below(4) {
        data.extend(noise.choose(&records));
    }
    for _ in 0..noise.below(4) {
        let at = 1 + place(noise, data.len() - 1);
        data[at] = odd(noise);
    }
    data
}

/// More small numbers than large ones, because frames and segments are parsed from them.
pub(crate) fn frames(noise: &mut Noise) -> Vec<u8> {
    let length = 1 + place(noise, 4000);
    let mut small = || if byte(noise) < 100 { byte(noise) % 16 } else { byte(noise) };
    (0..length).map(|_| small()).collect()
}

/// RFB messages with mostly zeros, so that their lengths are small.
pub(crate) fn messages(noise: &mut Noise) -> Vec<u8> {
    let mut bytes = vec![byte(noise)];
    for _ in 0..noise.below(12) {
        bytes.push(noise.choose(&[0, 2, 3, 4, 5, 6, 150, 248, 250, 251, 255, 77, 6]));
        let (count, few) = (place(noise, 30), noise.below(3) > 0);
        bytes.extend(noise.by_ref().take(count).map(|it| if few { it & 1 } else { it }));
    }
    bytes
}
