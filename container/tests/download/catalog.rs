//! Each version of the reference image, by the table of all of them: the fake Microsoft is asked
//! for the page, link and file of this version, and for nothing else.

use fake_microsoft::fault::Fault;

use crate::world::World;

const VERSIONS: &str = include_str!("../reference/versions.txt");
/// The link of the fake evaluation centre's page, by the number in the table.
const LINKS: [&str; 2] = ["LinkID=1&", "LinkID=2&"];

/// The rows of versions that can be installed: identifier, page, and the address of a file.
fn rows() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    let lines = VERSIONS.lines().filter(|line| !line.starts_with('#'));
    let rows = lines.map(|line| line.split(" | ").collect::<Vec<_>>());
    rows.filter(|row| row.len() > 2).map(|row| (row[1], row[3], row[5]))
}

/// The number of requests with these words.
fn count(requests: &[String], words: &str) -> usize {
    requests.iter().filter(|it| it.contains(words)).count()
}

#[test]
fn each_version_with_a_page_comes_from_that_page() {
    let mut pages = 0;
    for (id, page, _) in rows().filter(|(_, page, _)| *page != "-") {
        let world = World::new(vec![]);
        world.run(&[("VERSION", id)]).unwrap_or_else(|error| panic!("{id}: {error:#}"));
        assert!(world.is_whole(&format!("{id}.iso")), "{id}: {:?}", world.names());
        let requests = world.server.site.take_requests();
        let (name, number) = page.split_once(' ').unwrap();
        if name.starts_with("software-download/") {
            let asked = format!("www.microsoft.com/en-us/{name}");
            assert!(count(&requests, &asked) > 0, "{id}: {requests:?}");
            let product = format!("?profile=606624d44113&ProductEditionId={number}&");
            assert!(count(&requests, &product) > 0, "{id}: {requests:?}");
        } else {
            let asked = format!("www.microsoft.com/en-us/evalcenter/download-{name}");
            assert_eq!(count(&requests, "/evalcenter/"), count(&requests, &asked), "{requests:?}");
            assert!(count(&requests, &asked) > 0, "{id}: {requests:?}");
            let link = LINKS[number.parse::<usize>().unwrap()];
            assert!(count(&requests, link) > 0, "{id}: no {link} in {requests:?}");
            assert!(count(&requests, "&culture=en-us&country=us") > 0, "{requests:?}");
        }
        pages += 1;
    }
    assert_eq!(pages, 11);
}

#[test]
fn each_version_with_a_file_asks_for_it_when_the_page_fails() {
    let mut files = 0;
    for (id, _, file) in rows().filter(|(.., file)| *file != "-") {
        // Pages are no more; the file has another length here, and is refused.
        let world = World::new(vec![Fault::PageStatus(404)]);
        let (_, sentence) = world.refusal(&[("VERSION", id)]);
        assert!(sentence.contains("the server has another file"), "{id}: {sentence}");
        let url = file.rsplit(' ').next().unwrap().strip_prefix("https://").unwrap();
        let requests = world.server.site.take_requests();
        assert!(count(&requests, url) > 0, "{id}: {requests:?}");
        assert_eq!(world.names(), [""; 0], "{id}");
        files += 1;
    }
    assert_eq!(files, 13);
}

#[test]
fn versions_without_a_source_ask_nobody() {
    for (id, ..) in rows().filter(|(_, page, file)| *page == "-" && *file == "-") {
        let environment = [("VERSION".into(), id.into())].into();
        let settings = container::settings::environment::read(&environment).unwrap().settings;
        let error = container::download::refusal(&settings.windows.version).unwrap();
        assert!(error.to_string().contains("mount it as /custom.iso"), "{id}: {error}");
    }
}

#[test]
fn a_file_for_arm_is_refused_before_it_is_downloaded() {
    for name in ["Win11_24H2_English_Arm64.iso", "26100_A64FRE_en-us.iso"] {
        let world = World::new(vec![]);
        let address = format!("https://files.example.test/{name}");
        let (_, sentence) = world.refusal(&[("VERSION", &address)]);
        assert!(sentence.contains("it is for ARM processors"), "{sentence}");
        assert_eq!(world.names(), [""; 0]);
    }
}
