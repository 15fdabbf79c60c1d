//! Serves connections: TLS, plain HTTP, and tunnels through the port as a proxy.

use std::convert::Infallible;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::header::{
    ACCEPT_RANGES, AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE,
    ETAG, HOST, LOCATION, RANGE,
};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;
use tokio_rustls::TlsAcceptor;

use crate::fault::Fault;
use crate::pages;
use crate::{Served, Site};

const FLUSH: Duration = Duration::from_millis(50);
const BLOCK: u64 = 64 << 10;
/// The first byte of a TLS connection (RFC 8446 5.1).
const HANDSHAKE: u8 = 22;
/// The byte that is wrong with the fault `checksum`, counted from the end.
const WRONG: u64 = 1000;

pub(crate) async fn run(listener: TcpListener, acceptor: TlsAcceptor, site: Arc<Site>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        let (acceptor, site) = (acceptor.clone(), site.clone());
        // Clients that break off are part of the tests.
        tokio::spawn(async move { connection(stream, &acceptor, site).await.ok() });
    }
}

async fn connection(
    mut stream: TcpStream,
    acceptor: &TlsAcceptor,
    site: Arc<Site>,
) -> anyhow::Result<()> {
    let mut start = [0; 8];
    let count = stream.peek(&mut start).await?;
    if start[..count].first() == Some(&HANDSHAKE) {
        return serve(acceptor.accept(stream).await?, site).await;
    }
    if !start[..count].starts_with(b"CONNECT ") {
        return serve(stream, site).await;
    }
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") && head.len() < 4096 {
        head.push(stream.read_u8().await?);
    }
    site.note(String::from_utf8_lossy(&head).lines().next().unwrap_or_default().to_owned());
    stream.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await?;
    serve(acceptor.accept(stream).await?, site).await
}

async fn serve(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send,
    site: Arc<Site>,
) -> anyhow::Result<()> {
    let service = service_fn(move |request| {
        let site = site.clone();
        async move { Ok::<_, Infallible>(answer(&site, &request)) }
    });
    http1::Builder::new().serve_connection(TokioIo::new(stream), service).await?;
    Ok(())
}

type Answer = Response<UnsyncBoxBody<Bytes, io::Error>>;

fn text(text: impl Into<Bytes>) -> UnsyncBoxBody<Bytes, io::Error> {
    Full::new(text.into()).map_err(|never| match never {}).boxed_unsync()
}

fn header(request: &Request<Incoming>, name: hyper::header::HeaderName) -> &str {
    request.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

fn answer(site: &Arc<Site>, request: &Request<Incoming>) -> Answer {
    let host = header(request, HOST).split(':').next().unwrap_or_default().to_owned();
    let (path, query) = (request.uri().path(), request.uri().query().unwrap_or_default());
    let asked = if query.is_empty() { String::new() } else { format!("?{query}") };
    site.note(format!("{host}{path}{asked} {}", header(request, RANGE)));
    site.note_login(header(request, AUTHORIZATION));
    if let Some(page) = pages::find(site, &host, path, query) {
        let mut answer = Response::builder().status(page.status).header(CONTENT_TYPE, page.kind);
        if let Some(location) = page.location {
            answer = answer.header(LOCATION, location);
        }
        return answer.body(text(page.body)).expect("plain headers");
    }
    file(site, request)
}

/// The answers of servers that attack their clients.
fn attack(site: &Site) -> Option<Answer> {
    let is_attack = |fault: &Fault| {
        matches!(
            fault,
            Fault::Redirect(_) | Fault::Endless | Fault::Head | Fault::Drip | Fault::Bomb
        )
    };
    let answer = Response::builder();
    let (answer, body) = match site.has(is_attack)? {
        Fault::Redirect(to) => (answer.status(302).header(LOCATION, to), text(String::new())),
        Fault::Endless => (answer, repeat(Bytes::from(vec![0; 64 << 10]), Duration::ZERO)),
        Fault::Head => (answer.header(ETAG, "x".repeat(8 << 20)), text(String::new())),
        Fault::Drip => (answer, repeat(Bytes::from_static(b"x"), Duration::from_millis(100))),
        _ => (answer.header(CONTENT_ENCODING, "gzip"), text("\u{1f}\u{8b}\u{8}\0")),
    };
    Some(answer.body(body).expect("plain headers"))
}

/// The same bytes again and again.
fn repeat(bytes: Bytes, pause: Duration) -> UnsyncBoxBody<Bytes, io::Error> {
    let blocks = stream::unfold(bytes, move |bytes| async move {
        sleep(pause).await;
        Some((Ok(Frame::data(bytes.clone())), bytes))
    });
    StreamBody::new(Box::pin(blocks)).boxed_unsync()
}

fn file(site: &Arc<Site>, request: &Request<Incoming>) -> Answer {
    if let Some(answer) = attack(site) {
        return answer;
    }
    if let Some(Fault::Status(status)) = site.has(|fault| matches!(fault, Fault::Status(_))) {
        return Response::builder().status(status).body(text("no\n")).expect("a status");
    }
    if site.has(|fault| *fault == Fault::Html).is_some() {
        let page = "<!DOCTYPE html><html>Log in to the network first.</html>";
        let answer = Response::builder().header(CONTENT_TYPE, "text/html; charset=utf-8");
        return answer.body(text(page)).expect("plain headers");
    }
    let host = header(request, HOST).split(':').next().unwrap_or_default();
    let served = match &site.upgrade {
        Some(upgrade) if host == pages::UPGRADES || request.uri().path().ends_with(".esd") => {
            upgrade
        }
        _ => &site.iso,
    };
    let seems = match site.has(|fault| matches!(fault, Fault::Size(_))) {
        Some(Fault::Size(more)) => served.length + more,
        _ => served.length,
    };
    let asked = header(request, RANGE).strip_prefix("bytes=").and_then(|it| it.split_once('-'));
    let asked = asked.and_then(|(start, end)| {
        let start: u64 = start.parse().ok()?;
        let end = end.parse().map_or(seems, |end: u64| end.saturating_add(1)).min(seems);
        (start < end).then_some((start, end))
    });
    let asked = asked.filter(|_| site.has(|fault| *fault == Fault::NoRanges).is_none());
    let (start, end) = asked.unwrap_or((0, seems));
    let tag = match site.has(|fault| *fault == Fault::Changing) {
        Some(_) => format!("\"{start}\""),
        None => format!("\"{}\"", &served.sha1[..16]),
    };
    let answer = Response::builder()
        .status(if asked.is_some() { 206 } else { 200 })
        .header(CONTENT_TYPE, "application/octet-stream")
        .header(CONTENT_LENGTH, end - start)
        .header(ETAG, tag);
    let answer = match asked {
        Some(_) => {
            let range = format!("bytes {start}-{}/{seems}", end - 1);
            answer.header(ACCEPT_RANGES, "bytes").header(CONTENT_RANGE, range)
        }
        None => answer,
    };
    answer.body(body(site, served, start..end)).expect("plain headers")
}

/// Bytes of a file, with their faults.
fn body(
    site: &Arc<Site>,
    served: &Arc<Served>,
    Range { start, end }: Range<u64>,
) -> UnsyncBoxBody<Bytes, io::Error> {
    // The first bytes of a file are asked for only to look at them.
    let broken = if end - start > BLOCK {
        site.has(|fault| matches!(fault, Fault::Reset(_) | Fault::Stall(_)))
    } else {
        None
    };
    let part = |percent: u64| start + (end - start) * percent.min(100) / 100;
    let stop = match broken {
        Some(Fault::Reset(percent) | Fault::Stall(percent)) => part(percent),
        _ => end,
    };
    let stalls = matches!(broken, Some(Fault::Stall(_)));
    let slow = match site.has(|fault| matches!(fault, Fault::Slow(_))) {
        Some(Fault::Slow(rate)) => Some(Duration::from_secs_f64(64_000.0 / rate.max(1) as f64)),
        _ => None,
    };
    let wrong = site.has(|fault| *fault == Fault::Checksum).map(|_| served.length - WRONG);
    let served = served.clone();
    let blocks = stream::unfold(start, move |at| {
        let served = served.clone();
        async move {
            if at == end {
                return None;
            }
            if at >= stop {
                if stalls {
                    sleep(Duration::from_secs(3600)).await;
                }
                // Otherwise, bytes before the break would be lost, too.
                sleep(FLUSH).await;
                return Some((Err(io::ErrorKind::ConnectionReset.into()), end));
            }
            if let Some(pause) = slow {
                sleep(pause).await;
            }
            let length = usize::try_from(BLOCK.min(stop - at)).unwrap_or(0);
            let mut bytes = match served.read(at, length) {
                Ok(bytes) => bytes,
                Err(error) => return Some((Err(error), end)),
            };
            // A file that seems longer is filled up.
            bytes.resize(length, 0);
            if let Some(place) = wrong.and_then(|wrong| wrong.checked_sub(at))
                && let Some(byte) = usize::try_from(place).ok().and_then(|it| bytes.get_mut(it))
            {
                *byte ^= 0xff;
            }
            Some((Ok(Frame::data(Bytes::from(bytes))), at + length as u64))
        }
    });
    StreamBody::new(Box::pin(blocks)).boxed_unsync()
}
