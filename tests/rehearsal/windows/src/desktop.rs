//! Remote desktop, up to the first bytes of network level authentication (MS-RDPBCGR 2.2.1.1 and
//! 2.2.1.2): clients that offer it are asked to use it, and others are refused.

use std::io::{Read as _, Write as _};
use std::net::{Ipv6Addr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use super::console::say;

const PORT: u16 = 3389;
const PATIENCE: Duration = Duration::from_secs(10);
/// A connection request: TPKT, X.224, and the protocols that the client knows.
const REQUEST: usize = 19;
const HYBRID: u32 = 2;
/// The server's answers end with four bytes.
const ACCEPTED: [u8; 15] = [3, 0, 0, 19, 14, 0xd0, 0, 0, 0x12, 0x34, 0, 2, 0x1f, 8, 0];
const REFUSED: [u8; 15] = [3, 0, 0, 19, 14, 0xd0, 0, 0, 0x12, 0x34, 0, 3, 0, 8, 0];
/// The server accepts only clients with network level authentication.
const HYBRID_REQUIRED: u32 = 5;

/// Serves from now on. `only_hybrid` refuses clients without network level authentication.
pub(crate) fn start(only_hybrid: bool) -> anyhow::Result<()> {
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, PORT))?;
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            serve(stream, only_hybrid).ok();
        }
    });
    say!("remote desktops are accepted at port {PORT}");
    Ok(())
}

fn serve(mut stream: TcpStream, only_hybrid: bool) -> anyhow::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut request = [0; REQUEST];
    stream.read_exact(&mut request)?;
    stream.write_all(&answer(&request, only_hybrid))?;
    // The client goes first in what follows.
    stream.read(&mut request).map(drop)?;
    Ok(())
}

fn answer(request: &[u8; REQUEST], only_hybrid: bool) -> Vec<u8> {
    let protocols = u32::from_le_bytes([request[15], request[16], request[17], request[18]]);
    let is_request = request[..4] == [3, 0, 0, 19] && request[5] == 0xe0 && request[11] == 1;
    let (start, end) = match (is_request, protocols & HYBRID != 0) {
        (false, _) => return Vec::new(),
        (true, true) => (ACCEPTED, HYBRID),
        (true, false) if only_hybrid => (REFUSED, HYBRID_REQUIRED),
        (true, false) => (ACCEPTED, protocols & 1),
    };
    [&start[..], &end.to_le_bytes()].concat()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn only_clients_with_network_level_authentication_are_accepted() {
        let request =
            |protocols: u8| [3, 0, 0, 19, 14, 0xe0, 0, 0, 0, 0, 0, 1, 0, 8, 0, protocols, 0, 0, 0];
        assert_eq!(answer(&request(3), true)[11..], [2, 0x1f, 8, 0, 2, 0, 0, 0]);
        assert_eq!(answer(&request(1), true)[11..], [3, 0, 8, 0, 5, 0, 0, 0]);
        assert_eq!(answer(&request(1), false)[11..], [2, 0x1f, 8, 0, 1, 0, 0, 0]);
        assert_eq!(answer(&[0; REQUEST], true), []);
    }
}
