//! Runs the fuzz target of downloads with fixed seeds, and with texts that are nearly right.

mod hostile_download;

use host::testutil::noise::Noise;

const TEXTS: [&str; 12] = [
    hostile_download::REPLIES[0],
    hostile_download::REPLIES[2],
    hostile_download::REPLIES[4],
    hostile_download::REPLIES[5],
    "{\"Errors\":[{\"Value\":\"Sentinel marked this request as rejected.\",\"Type\":9}]}",
    "<a href=\"https://go.microsoft.com/fwlink/p/?LinkID=1&amp;culture=en-us&amp;country=us\">",
    "MSCF\0\0\0\0\0\0\0\0\0\0\0\0\u{2c}\0\0\0\0\0\0\0\u{3}\u{1}\u{1}\0\u{1}\0\0\0",
    "bytes 0-4194303/41945088",
    "https://me:pw@files.example:8443/a/b%2fc.iso?sig=1#sha256=00",
    "//b.example/../x y",
    "{\"length\":41945088,\"tag\":\"\\\"a\\\"\",\"done\":[[0,4194304],[41943040,41945088]]}",
    "<File id=\"1\"><LanguageCode>de-de</LanguageCode><Edition>Professional</Edition>\
     <Architecture>x64</Architecture><FilePath>http://a.microsoft.com/x</FilePath></File>",
];

#[test]
fn replies_with_any_bytes_are_read_or_refused() {
    for text in TEXTS {
        for kind in 0..8 {
            for number in [0, 2, 4, 5, 0x45, 0xa5] {
                hostile_download::read(&[&[kind, number], text.as_bytes()].concat());
                hostile_download::read(&[&[kind], text.as_bytes()].concat());
            }
        }
    }
    let mut noise = Noise::new(16);
    for _ in 0..20_000 {
        let at = usize::try_from(noise.below(TEXTS.len() as u64)).expect("below a length");
        let mut bytes = TEXTS[at].as_bytes().to_vec();
        for _ in 0..=noise.below(6) {
            let place = usize::try_from(noise.below(bytes.len() as u64)).expect("below a length");
            let byte = u8::try_from(noise.below(256)).expect("a byte");
            match noise.below(3) {
                0 => bytes[place] = byte,
                1 => bytes.insert(place, byte),
                _ => bytes.truncate(place.max(1)),
            }
        }
        let head = [0, 1].map(|_| u8::try_from(noise.below(256)).expect("a byte"));
        hostile_download::read(&[&head[..], &bytes].concat());
        hostile_download::read(&[&head[..1], &bytes].concat());
    }
}
