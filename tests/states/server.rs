//! Web servers and proxies that do not serve what was asked for.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::thread;

/// A page, as of a hotel's network that asks for a login.
const PAGE: &str = "<!DOCTYPE html><html><title>Log in</title></html>";

/// Images of which only the start comes, and their lengths.
const LONG: [(&str, u64); 2] = [("cut.iso", 64 << 20), ("large.iso", 1 << 39)];

/// Serves until the test ends. The path says what is wrong.
pub(crate) fn serve(listener: TcpListener) {
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || answer(&stream));
        }
    });
}

/// A client that leaves is no mistake.
fn answer(stream: &TcpStream) -> Option<()> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next()?.ok()?;
    while !lines.next()?.ok()?.is_empty() {}
    let path = first.split(' ').nth(1)?;
    if let Some((_, length)) = LONG.iter().find(|(name, _)| path.ends_with(name)) {
        return stop_amid(stream, *length);
    }
    let (status, more, body) = match path.rsplit('/').next()? {
        "missing.iso" => ("404 Not Found", String::new(), PAGE),
        "loop.iso" => ("302 Found", format!("Location: {path}\r\n"), ""),
        "zip.iso" => ("200 OK", String::new(), "PK\x03\x04 is an archive"),
        "empty.iso" => ("200 OK", String::new(), ""),
        _ => ("200 OK", "Content-Type: text/html\r\n".to_owned(), PAGE),
    };
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\n{more}Content-Length: {length}\r\n");
    let mut stream = stream;
    write!(stream, "{head}Connection: close\r\n\r\n{body}").ok()
}

/// Sends the start of a CD, and then nothing until the client leaves.
fn stop_amid(mut stream: &TcpStream, length: u64) -> Option<()> {
    let mut start = vec![0; 1 << 20];
    start[32768..][..7].copy_from_slice(b"\x01CD001\x01");
    write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n").ok()?;
    stream.write_all(&start).ok()?;
    stream.read(&mut start).ok().map(drop)
}
