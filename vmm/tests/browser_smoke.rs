//! The fuzzer of the web door, for as long as a test may take and always the same.

mod hostile_browser;

use devices::testutil::hostile::Noise;

const ROUNDS: u64 = 3000;

/// What requests, forms, cookies and frames are made of.
const PARTS: [&[u8]; 32] = [
    b"GET / HTTP/1.1\r\n",
    b"GET /session HTTP/1.1\r\n",
    b"GET /login HTTP/1.1\r\n",
    b"GET /websockify HTTP/1.1\r\n",
    b"GET /files/../index.html HTTP/1.1\r\n",
    b"GET /files/%2e%2e/%00 HTTP/1.0\r\n",
    b"POST /login HTTP/1.1\r\n",
    b"POST /logout HTTP/1.1\r\n",
    b"Host: 10.0.0.1\r\n",
    b"Host: vm.example:80\r\n",
    b"Origin: null\r\n",
    b"Origin: http://10.0.0.1\r\n",
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
    b"Content-Length: 20\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"X-Forwarded-For: 127.0.0.1\r\nX-Forwarded-Host: a, b\r\n",
    b"\r\n",
    b"password=",
    b"user=me&",
    b"%zz%41+%",
    b"transom=",
    b"; transom80=0; ",
    b"http://vm.example",
    b"https://vm.example:443",
    b"bWU6bm9wZQ==",
    &[0x82, 0x8c, 0, 0, 0, 0, b'R', b'F', b'B', b' ', b'0', b'0', b'3', b'.', b'0', b'0', b'8', 10],
    &[0x82, 0x82, 0, 0, 0, 0, 1, 1],
    &[0x02, 0x81, 0, 0, 0, 0, 3],
    &[0x80, 0x80, 0, 0, 0, 0],
    &[0x89, 0x80, 0, 0, 0, 0],
    &[0x82, 0xff, 0, 0, 0, 0, 0, 0x1f, 255, 255, 0, 0, 0, 0],
];

#[test]
fn whatever_a_browser_says_is_answered_and_lets_nobody_in() {
    let bench = hostile_browser::Bench::shared();
    for seed in 0..ROUNDS {
        let mut noise = Noise::new(seed);
        let mut bytes = vec![seed.to_le_bytes()[0]];
        for _ in 0..noise.below(16) {
            bytes.extend(noise.of(&PARTS));
            if noise.below(8) == 0 {
                let count = usize::try_from(noise.below(12)).unwrap();
                bytes.extend(noise.by_ref().take(count));
            }
        }
        bench.talk(&bytes);
    }
}
