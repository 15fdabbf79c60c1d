//! Tests of the files and of the connection between two pods.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
use tokio::time::timeout;
use tokio_rustls::rustls::pki_types::ServerName;

use super::tls::{Key, Known, PublicKey};
use super::*;

const SOON: Duration = Duration::from_secs(20);

fn known(key: &Key) -> Known {
    let public = key.public();
    Box::new(move || Ok(public.clone()))
}

/// Whether a pod with the first key reaches one with the second, which expect these keys.
async fn reaches([from, to]: [&Key; 2], [expects, allows]: [Known; 2]) -> bool {
    let (one, other) = duplex(1 << 16);
    let (connector, acceptor) = (from.connector(expects).unwrap(), to.acceptor(allows).unwrap());
    let served = tokio::spawn(async move {
        let mut stream = acceptor.accept(other).await?;
        stream.write_all(ACCEPTED).await
    });
    let reached = async {
        let name = ServerName::try_from("pod").unwrap();
        let mut stream = connector.connect(name, one).await?;
        let mut line = [0; ACCEPTED.len()];
        stream.read_exact(&mut line).await?;
        io::Result::Ok(line == *ACCEPTED)
    };
    let reached = timeout(SOON, reached).await.unwrap().unwrap_or(false);
    served.await.unwrap().ok();
    reached
}

#[tokio::test]
async fn pods_accept_only_each_others_keys() {
    let [one, other, stranger] = [(); 3].map(|()| Key::make().unwrap());
    let missing = || -> Known { Box::new(|| anyhow::bail!("no such file")) };
    assert!(reaches([&one, &other], [known(&other), known(&one)]).await);
    assert!(!reaches([&stranger, &other], [known(&other), known(&one)]).await);
    assert!(!reaches([&one, &stranger], [known(&other), known(&one)]).await);
    assert!(!reaches([&one, &other], [known(&other), missing()]).await);
    assert!(!reaches([&one, &other], [missing(), known(&one)]).await);
}

#[tokio::test]
async fn a_client_without_a_key_is_refused() {
    let [one, other] = [(); 2].map(|()| Key::make().unwrap());
    let (mut client, server) = duplex(1 << 16);
    let acceptor = other.acceptor(known(&one)).unwrap();
    let served = tokio::spawn(async move { acceptor.accept(server).await.map(drop) });
    client.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    assert!(timeout(SOON, served).await.unwrap().unwrap().is_err());
}

fn waiting(key: &PublicKey) -> Waiting {
    Waiting::new(key.clone(), vec!["10.0.0.1".parse().unwrap(); 30], 49152)
}

#[test]
fn one_pod_waits_at_a_time_and_only_while_it_is_there() {
    let (folder, key) = (tempfile::tempdir().unwrap(), Key::make().unwrap().public());
    let folder = folder.path();
    let offered = waiting(&key);
    assert_eq!(Waiting::find(folder).unwrap(), None);
    let place = Place::take(folder, &offered).unwrap().unwrap();
    assert!(Place::take(folder, &offered).unwrap().is_none());
    let found = Waiting::find(folder).unwrap().unwrap();
    assert_eq!((&found, found.addresses.len()), (&offered, MAX_ADDRESSES));
    // A pod that is killed leaves its file.
    drop(place);
    assert!(folder.join(WAITING).exists());
    assert_eq!(Waiting::find(folder).unwrap(), None);
    Place::take(folder, &offered).unwrap().unwrap().leave(folder);
    assert!(!folder.join(WAITING).exists());
    clear(folder);
    assert_eq!(fs::read_dir(folder).unwrap().count(), 0);
}

#[test]
fn files_of_other_versions_and_damaged_ones_are_refused() {
    let (folder, key) = (tempfile::tempdir().unwrap(), Key::make().unwrap().public());
    let folder = folder.path();
    let running = Running::new(key.clone(), 2, 1 << 30);
    running.write(folder).unwrap();
    assert_eq!(Running::read(folder).unwrap(), running);
    Running { format: 2, ..running.clone() }.write(folder).unwrap();
    let error = Running::read(folder).unwrap_err().to_string();
    assert!(error.contains("use the same image"), "{error}");
    let _place = Place::take(folder, &waiting(&key)).unwrap().unwrap();
    for text in ["", "{}", &"x".repeat(5000)] {
        fs::write(folder.join(RUNNING), text).unwrap();
        fs::write(folder.join(WAITING), text).unwrap();
        assert!(Running::read(folder).is_err() && Waiting::find(folder).is_err(), "{text:.9}");
    }
    fs::remove_file(folder.join(RUNNING)).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", folder.join(RUNNING)).unwrap();
    assert!(Running::read(folder).is_err());
}
