//! The fuzzers of DHCP and DNS, for as long as a test may take and always the same.

mod hostile_guest;
mod noise;

use self::noise::Noise;

const ROUNDS: u64 = 100_000;

impl Noise {
    fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[0]
    }

    /// Small numbers, large ones, and any.
    fn odd(&mut self) -> u8 {
        match self.below(4) {
            0 => self.byte() % 8,
            1 => 255 - self.byte() % 8,
            2 => self.byte() & 0xc0,
            _ => self.byte(),
        }
    }
}

#[test]
fn whatever_a_client_says_to_dhcp_is_answered_or_not() {
    // Those that the server reads, and any other.
    let codes = [0, 50, 52, 53, 54, 57, 61, 255];
    for seed in 0..ROUNDS {
        let mut noise = Noise(seed);
        let mut message = vec![0; 236];
        for _ in 0..noise.below(8) {
            let at = noise.below(message.len());
            message[at] = noise.odd();
        }
        message.extend([99, 130, 83, 99]);
        message.extend([53, 1, [1, 3, 4, 7, 8][noise.below(5)]]);
        for _ in 0..noise.below(6) {
            let code = if noise.below(4) == 0 { noise.odd() } else { codes[noise.below(8)] };
            let length = if noise.below(8) == 0 { noise.odd() } else { noise.byte() % 8 };
            message.extend([code, length]);
            message.extend((0..length % 16).map(|_| noise.odd()));
        }
        if noise.below(8) == 0 {
            message.truncate(noise.below(message.len()));
        }
        hostile_guest::dhcp(&message);
    }
}

#[test]
fn whatever_is_asked_and_answered_of_names_does_no_harm() {
    let names: [&[u8]; 7] = [
        b"\x04host\x03lan\0",
        b"\x07Windows\0",
        b"\x03web\x05other\0",
        b"\x03web\x03lan\0",
        b"\x011\x010\x0230\x03172\x07in-addr\x04arpa\0",
        b"\0",
        b"\x01.\x02\xff\0\0",
    ];
    for seed in 0..ROUNDS {
        let mut noise = Noise(seed);
        let mut message = vec![1, 2, 1, 0, 0, 1, 0, 0, 0, 0, 0, noise.byte() % 2];
        message.extend(names[noise.below(names.len())]);
        message.extend([0, [1, 12, 28, 255][noise.below(4)], 0, 1]);
        // Sometimes an OPT record, or what begins like one.
        let opt = [0, 0, 41, 4, 208, 0, 0, 0, 0, 0, noise.byte() % 3];
        message.extend(&opt[..noise.below(opt.len() + 1)]);
        for _ in 0..noise.below(3) {
            let at = noise.below(message.len());
            message[at] = noise.odd();
        }
        let cut = u8::try_from(message.len()).expect("it is short");
        let mut data = [&[cut][..], &message].concat();
        let records: [&[u8]; 4] = [
            b"\xc0\x0c\0\x01\0\x01\0\0\0\x3c\0\x04\x7f\0\0\x01",
            b"\xc0\x0c\0\x05\0\x01\0\0\0\x3c\0\x02\xc0\x0c",
            b"\xc0\x0c\0\x05\0\x01\0\0\0\x3c\0\x06\x03www\xc0\x10",
            b"\0\0\x29\x04\xd0\0\0\0\0\0\0",
        ];
        data.extend([0, 1, 0, 0, 0, 0].iter().map(|byte| byte | noise.byte() & 3));
        for _ in 0..noise.below(4) {
            data.extend(records[noise.below(records.len())]);
        }
        for _ in 0..noise.below(4) {
            let at = 1 + noise.below(data.len() - 1);
            data[at] = noise.odd();
        }
        hostile_guest::dns(&data);
    }
}

#[test]
fn whatever_stands_in_resolv_conf_is_read_or_passed_over() {
    let parts: [&[u8]; 12] = [
        b"nameserver ",
        b"search ",
        b"domain ",
        b"options ",
        b"ndots:",
        b"timeout:9999999999999999999999 ",
        b"10.0.0.1 ",
        b"::1%eth0 ",
        b"a.b.c. ",
        b".. ",
        b"\n",
        b"\xff\xfe ",
    ];
    for seed in 0..ROUNDS {
        let mut noise = Noise(seed);
        let length = noise.below(12);
        let text: Vec<&[u8]> = (0..length).map(|_| parts[noise.below(parts.len())]).collect();
        hostile_guest::resolv(&text.concat());
    }
    hostile_guest::resolv(&b"search a.b c ".repeat(100_000));
}
