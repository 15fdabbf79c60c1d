//! Web servers and proxies that do not serve what was asked for.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::thread;

/// A page, as of a hotel's network that asks for a login.
const PAGE: &str = "<!DOCTYPE html><html><title>Log in</title></html>";

/// Serves until the test ends. The path says what is wrong.
pub(crate) fn serve(listener: TcpListener) {
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || answer(stream));
        }
    });
}

/// A client that leaves is no mistake.
fn answer(stream: TcpStream) -> Option<()> {
    let mut lines = BufReader::new(&stream).lines();
    let first = lines.next()?.ok()?;
    while !lines.next()?.ok()?.is_empty() {}
    let path = first.split(' ').nth(1)?;
    let (status, more, body) = match path.rsplit('/').next()? {
        "missing.iso" => ("404 Not Found", String::new(), PAGE),
        "loop.iso" => ("302 Found", format!("Location: {path}\r\n"), ""),
        "zip.iso" => ("200 OK", String::new(), "PK\x03\x04 is an archive"),
        "empty.iso" => ("200 OK", String::new(), ""),
        _ => ("200 OK", "Content-Type: text/html\r\n".to_owned(), PAGE),
    };
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\n{more}Content-Length: {length}\r\n");
    write!(&stream, "{head}Connection: close\r\n\r\n{body}").ok()
}
