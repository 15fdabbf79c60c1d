//! Sockets that are inherited from another process, and two sockets for viewers with different
//! rules.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use rustix::process::Signal;
use transom_tests::program::{PATIENCE, Running, connect};
use vmm::control::Command;

use crate::runs_here;

/// A copy of a socket that a program inherits, and the program's word for it.
fn inheritable(socket: &impl AsFd) -> (OwnedFd, String) {
    let copy = rustix::io::dup(socket).expect("a file descriptor");
    let word = format!("fd:{}", copy.as_raw_fd());
    (copy, word)
}

fn listen(path: &Path) -> UnixListener {
    UnixListener::bind(path).expect("a socket")
}

/// The types of security that the server offers to a viewer.
fn security(mut line: impl Read + Write) -> Vec<u8> {
    let mut version = [0; 12];
    line.read_exact(&mut version).expect("a version");
    line.write_all(&version).expect("room");
    let mut count = [0];
    line.read_exact(&mut count).expect("a count");
    let mut types = vec![0; count[0].into()];
    line.read_exact(&mut types).expect("types");
    types
}

#[test]
fn clients_connect_through_inherited_sockets() {
    if !runs_here("clients_connect_through_inherited_sockets") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    fs::write(at("password"), "secret\n").expect("a file");
    let port = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).expect("a port");
    let address = (Ipv4Addr::LOCALHOST, port.local_addr().expect("its number").port());
    let (web, control) = (listen(&at("web")), listen(&at("control")));
    // A client that connects before there is a machine waits for it.
    let (early, page) = (TcpStream::connect(address), UnixStream::connect(at("web")));
    let (_port, vnc_place) = inheritable(&port);
    let (_web, web_place) = inheritable(&web);
    let (_control, control_place) = inheritable(&control);
    let guarded = format!("{vnc_place},password={}", at("password").display());
    let near = format!("unix:{}", at("vnc").display());
    let words = ["run", "--control", &control_place, "--vnc", &guarded, "--vnc", &near];
    let more = ["--web", &web_place, "--cmdline", "then=halt"];
    let mut machine = Running::vmm(&[&words[..], &more].concat()).expect("vmm");
    let (early, mut page) = (early.expect("the port"), page.expect("the socket"));
    early.set_read_timeout(Some(PATIENCE)).expect("a time-out");
    page.set_read_timeout(Some(PATIENCE)).expect("a time-out");
    assert_eq!(security(early), [2], "this socket asks for a password");
    let near = UnixStream::connect(at("vnc")).expect("the socket");
    assert_eq!(security(near), [1], "this socket does not");
    page.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        .expect("room");
    let mut answer = String::new();
    page.read_to_string(&mut answer).expect("a page");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let mut client = connect(&at("control")).expect("the control socket");
    assert_eq!(client.ask(&Command::Status).expect("a status")["state"], "running");
    machine.signal(Signal::TERM).expect("a signal");
    assert_eq!(machine.wait(PATIENCE).expect("an end"), 128 + 15);
    let kept = |name: &str| at(name).exists();
    assert!(
        kept("web") && kept("control") && !kept("vnc"),
        "only the machine's own socket is removed"
    );
    // A second machine uses the same sockets.
    let mut next = Running::vmm(&["run", "--vnc", &guarded, "--cmdline", "then=halt"]);
    let next = next.as_mut().expect("vmm");
    assert_eq!(security(TcpStream::connect(address).expect("the port")), [2]);
    next.signal(Signal::TERM).expect("a signal");
    assert_eq!(next.wait(PATIENCE).expect("an end"), 128 + 15);
}

#[test]
fn an_invalid_inherited_descriptor_is_refused_in_one_sentence() {
    let folder = tempfile::tempdir().expect("a folder");
    let port = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).expect("a port");
    let file = fs::File::create(folder.path().join("file")).expect("a file");
    let (near, _far) = UnixStream::pair().expect("a pair");
    let ((_port, port), (_file, file)) = (inheritable(&port), inheritable(&file));
    let (_near, near) = inheritable(&near);
    let gone = "fd:1000".to_owned();
    for (option, place, words) in [
        ("--vnc", &port, "auth=none"),
        ("--web", &port, "password=FILE"),
        ("--control", &port, "a Unix socket is needed"),
        ("--vnc", &file, "is not a socket"),
        ("--web", &near, "does not listen"),
        ("--control", &gone, "was it inherited?"),
    ] {
        let mut machine = Running::vmm(&["run", option, place]).expect("vmm");
        assert_eq!(machine.wait(PATIENCE).expect("an end"), 1);
        let said = machine.stderr.text();
        assert!(said.contains(option) && said.contains(words), "{option} {place}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}
